"""The output head: RMSNorm, vocabulary projection and cross-entropy in one piece.

The logits [tokens, V] of a large vocabulary would be the largest array of the model and their gradient
as large again, so both exist for one chunk of tokens at a time. When a gradient is wanted, the same pass
also makes it (as in Liger Kernel, arXiv 2410.10989, section 3.2): three matmuls in all, nothing repeated.

Shape letters: B sequences, S tokens, H hidden size, V vocabulary, T = B * S tokens, C tokens in a chunk.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.models.collectives import device_index, gather_sequence, max_over_model, sum_over_model
from jaxpipe.models.layers import TABLE_STD, normal, rms_norm
from jaxpipe.models.piece import Batch, Values

_F32 = jnp.float32


class Head(nn.Module):
    """x [B, S/tp, H] -> loss "nll": the sum of weights * -log p(target), float32.

    The table [V, H] is split over `model` by rows. Each device's loss counts the tokens of its own shard
    of the sequence, so the sum over `model` is the loss; the gradients belong to that sum.

    chunk: tokens for which logits exist at a time.
    soft_cap: logits l become soft_cap * tanh(l / soft_cap); None leaves them.
    """

    vocab: int
    hidden: int
    chunk: int
    norm_eps: float
    soft_cap: float | None = None
    tp: int = 1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, values: Values, batch: Batch):
        scale = self.param("norm", nn.initializers.ones, (self.hidden,))
        table = self.param("table", normal(TABLE_STD, ("model", None)), (self.vocab // self.tp, self.hidden))
        n = gather_sequence(rms_norm(values["x"], scale, self.norm_eps), self.tp)
        loss = cross_entropy(
            n.reshape(-1, self.hidden),
            table,
            batch["targets"].reshape(-1),
            batch["weights"].reshape(-1),
            _own_tokens(batch["weights"].shape, self.tp).reshape(-1),
            self.chunk,
            self.soft_cap,
            self.tp,
        )
        return {}, {"nll": loss}


def _own_tokens(shape: tuple[int, int], tp: int) -> jax.Array:
    """bool[B, S]: the tokens of this device's shard of the sequence."""
    position = lax.broadcasted_iota(jnp.int32, shape, 1)
    return position // (shape[1] // tp) == device_index(tp)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def cross_entropy(x, table, targets, weights, own, chunk: int, soft_cap: float | None, tp: int) -> jax.Array:
    """sum(weights * own * nll), float32, without all logits at once. Differentiable in x and table.

    Under `tp` > 1 the derivative takes the cotangent to be equal on all devices of `model`, as it is when
    the losses of all devices are added.

    Args:
      x: [T, H], all tokens on every device of `model`.
      table: [V/tp, H], this device's rows; used in x's dtype, its gradient summed in float32.
      targets: int32[T].
      weights: float32[T], not differentiated.
      own: bool[T], the tokens that this device's loss counts.
      chunk, soft_cap, tp: as for `Head`.
    """
    return _scan_chunks(x, table, targets, weights, own, chunk, soft_cap, tp, gradients=False)[0]


def _forward(x, table, targets, weights, own, chunk, soft_cap, tp):
    loss, dx, dtable = _scan_chunks(x, table, targets, weights, own, chunk, soft_cap, tp, gradients=True)
    return loss, (dx, dtable)


def _backward(chunk, soft_cap, tp, residuals, cotangent):
    dx, dtable = ((cotangent * d).astype(d.dtype) for d in residuals)
    return dx, dtable, None, None, None


cross_entropy.defvjp(_forward, _backward)


def _scan_chunks(x, table, targets, weights, own, chunk, soft_cap, tp, gradients: bool):
    """The loss and, if wanted, its gradients dx [T, H] and dtable [V/tp, H] (else None)."""
    tokens, columns = x.shape[0], table.astype(x.dtype)
    chunk = min(chunk, tokens)
    count = -(-tokens // chunk)
    inputs = [_chunks(a, count, chunk) for a in (x, targets, weights, own)]

    def visit(carry, chunk_inputs):
        loss, dtable = carry
        more, dlogits = _chunk_loss(columns, *chunk_inputs, soft_cap, tp)
        if not gradients:
            return (loss + more, None), None
        x_CxH, dlogits = chunk_inputs[0], dlogits.astype(x.dtype)
        dx = jnp.einsum("cv,vh->ch", dlogits, columns, preferred_element_type=_F32)
        dtable += jnp.einsum("cv,ch->vh", dlogits, x_CxH, preferred_element_type=_F32)
        return (loss + more, dtable), dx.astype(x.dtype)

    # Made like the operands: inside `shard_map` a carry must vary over the mesh axes that they vary over.
    zero = sum(lax.full_like(a, 0, _F32, ()) for a in (x, table, targets, weights, own))
    carry = zero, lax.full_like(zero, 0, _F32, table.shape) if gradients else None
    if count == 1:
        (loss, dtable), dx = visit(carry, [a[0] for a in inputs])
    else:
        (loss, dtable), dx = lax.scan(visit, carry, inputs)
    if not gradients:
        return loss, None, None
    return loss, dx.reshape(-1, x.shape[1])[:tokens], dtable.astype(table.dtype)


def _chunk_loss(columns, x_CxH, targets_C, weights_C, own_C, soft_cap, tp):
    """Loss of a chunk (own tokens) and its gradient (all tokens) by the logits, float32[C, V/tp]."""
    logits = jnp.einsum("ch,vh->cv", x_CxH, columns, preferred_element_type=_F32)
    slope = None
    if soft_cap is not None:
        t = jnp.tanh(logits / soft_cap)
        logits, slope = soft_cap * t, 1 - t * t
    column = targets_C - device_index(tp) * columns.shape[0]
    hit_CxV = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == column[:, None]
    largest = max_over_model(logits.max(-1), tp)
    e = jnp.exp(logits - largest[:, None])
    total = sum_over_model(e.sum(-1), tp)
    target_logit = sum_over_model(jnp.where(hit_CxV, logits, 0).sum(-1), tp)
    nll = jnp.log(total) + largest - target_logit
    dlogits = weights_C[:, None] * (e / total[:, None] - hit_CxV)
    if slope is not None:
        dlogits = dlogits * slope
    return jnp.sum(jnp.where(own_C, weights_C * nll, 0)), dlogits


def _chunks(a: jax.Array, count: int, chunk: int) -> jax.Array:
    """[T, ...] -> [count, chunk, ...]; the tail is filled with zeros, which have no weight."""
    tail = count * chunk - a.shape[0]
    if tail:
        a = jnp.pad(a, [(0, tail)] + [(0, 0)] * (a.ndim - 1))
    return a.reshape(count, chunk, *a.shape[1:])
