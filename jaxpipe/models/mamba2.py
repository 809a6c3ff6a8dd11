"""The Mamba-2 block (Dao and Gu 2024, arXiv 2405.21060) in the chunked form of its section 6.

Shape letters: B sequences, S tokens, H hidden size, G groups, R heads in a group, P head size, E state
size, W width of the convolution, C chunks of Q tokens. Each group shares its input and output vectors
("B" and "C" in the paper, here `b` and `c`). Neither state nor convolution crosses from one packed
document into the next.
"""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.models.collectives import gather_sequence, scatter_sequence
from jaxpipe.models.layers import normal, project, residual_std, rms_norm
from jaxpipe.models.piece import Batch, Values


def run_numbers(segments_BxS: jax.Array) -> jax.Array:
    """int32[B, S]: numbers the runs of equal segments from 0, so that every change starts a new one."""
    change = segments_BxS[:, 1:] != segments_BxS[:, :-1]
    return jnp.cumsum(jnp.pad(change, ((0, 0), (1, 0))), axis=1, dtype=jnp.int32)


def causal_conv(x: jax.Array, kernel: jax.Array, bias: jax.Array, runs_BxS: jax.Array) -> jax.Array:
    """Depthwise causal convolution and SiLU: silu(bias + sum_w kernel[w] * x[t - w]) within each run.

    x [B, S, G, ...], kernel [W, G, ...], bias [G, ...]; summed in float32, given in x's dtype.
    Shifted sums, since XLA's convolutions with one input channel a group are slow on CPUs.
    """
    length, wide = x.shape[1], x.astype(jnp.float32)
    y = bias + wide * kernel[0]
    for w in range(1, kernel.shape[0]):
        shifted = jnp.pad(wide, [(0, 0), (w, 0)] + [(0, 0)] * (x.ndim - 2))[:, :length]
        earlier = jnp.pad(runs_BxS, ((0, 0), (w, 0)), constant_values=-1)[:, :length]
        same = (earlier == runs_BxS).reshape(*runs_BxS.shape, *[1] * (x.ndim - 2))
        y = y + jnp.where(same, shifted, 0) * kernel[w]
    return nn.silu(y).astype(x.dtype)


def ssd(x, dt, a, b, c, runs, chunk: int) -> jax.Array:
    """State-space duality: y[t] = c[t] h[t] with h[t] = exp(dt[t] a) h[t-1] + dt[t] b[t] x[t]^T.

    h is a matrix [E, P] for every head and starts from 0 in every run. Section 6 of the paper: within a chunk
    a masked attention, across chunks a recurrence over one state a chunk. Matmuls in x's dtype; decays
    and the recurrence in float32.

    Args:
      x: [B, S, G, R, P].
      dt: float32[B, S, G, R], positive step sizes.
      a: float32[G, R], negative.
      b, c: [B, S, G, E].
      runs: int32[B, S], see `run_numbers`.
      chunk: tokens in a chunk; any S will do.

    Returns:
      y: [B, S, G, R, P] in x's dtype.
    """
    length, shape = x.shape[1], x.shape
    size = min(chunk, length)
    tail = -length % size
    # Padded tokens have dt = 0: they neither change the state nor decay it.
    x_BxCxGxRxQxP = _chunks(x, size, tail).transpose(0, 1, 3, 4, 2, 5)
    dt_BxCxGxRxQ = _chunks(dt, size, tail).transpose(0, 1, 3, 4, 2)
    b, c = (_chunks(u, size, tail).transpose(0, 1, 3, 2, 4) for u in (b, c))  # [B, C, G, Q, E]
    runs_BxCxQ = _chunks(runs, size, tail, mode="edge")
    earlier = jnp.tril(jnp.ones((size, size), bool))
    # A running sum by matmul: XLA would fuse jnp.cumsum into the array over Q x Q and repeat it there.
    sums_BxCxGxRxQ = jnp.einsum(
        "bcgrk,qk->bcgrq", dt_BxCxGxRxQ * a[..., None], earlier.astype(jnp.float32), precision="highest"
    )
    xdt = (x_BxCxGxRxQxP * dt_BxCxGxRxQ[..., None]).astype(x.dtype)

    same = (runs_BxCxQ[:, :, :, None] == runs_BxCxQ[:, :, None, :]) & earlier
    gap = sums_BxCxGxRxQ[..., :, None] - sums_BxCxGxRxQ[..., None, :]
    # Masked before exp, which would overflow above the diagonal.
    decay_BxCxGxRxQxQ = jnp.exp(jnp.where(same[:, :, None, None], gap, -jnp.inf))
    scores = jnp.einsum("bcgqe,bcgke->bcgqk", c, b)
    mixing = (scores[:, :, :, None] * decay_BxCxGxRxQxQ).astype(x.dtype)
    y = jnp.einsum("bcgrqk,bcgrkp->bcgrqp", mixing, xdt)
    if y.shape[1] > 1:
        y = y + _from_earlier_chunks(xdt, sums_BxCxGxRxQ, b, c, runs_BxCxQ)
    return y.transpose(0, 1, 4, 2, 3, 5).reshape(shape[0], -1, *shape[2:])[:, :length]


def _from_earlier_chunks(xdt, sums, b, c, runs) -> jax.Array:
    """What each chunk reads from the state that the chunks before it left: [B, C, G, R, Q, P]."""
    last = runs[:, :, -1:]
    before = jnp.concatenate([last[:, :1], last[:, :-1]], axis=1)
    to_end = jnp.where((runs == last)[:, :, None, None], jnp.exp(sums[..., -1:] - sums), 0)
    through = jnp.where((last == before)[..., None], jnp.exp(sums[..., -1]), 0)
    from_start = jnp.where((runs == before)[:, :, None, None], jnp.exp(sums), 0)
    kept = (xdt * to_end[..., None]).astype(xdt.dtype)
    added = jnp.einsum("bcgqe,bcgrqp->cbgrep", b, kept).astype(jnp.float32)

    def step(state, decay_and_added):
        decay, more = decay_and_added
        return state * decay[..., None, None] + more, state

    _, entering = lax.scan(step, jnp.zeros_like(added[0]), (jnp.moveaxis(through, 1, 0), added))
    y = jnp.einsum("bcgqe,cbgrep->bcgrqp", c, entering.astype(xdt.dtype))
    return (y * from_start[..., None]).astype(xdt.dtype)


def _chunks(u: jax.Array, size: int, tail: int, mode: str = "constant") -> jax.Array:
    """[B, S, ...] -> [B, C, Q, ...] by chunks of Q = `size` after `tail` more tokens at the end."""
    if tail:
        u = jnp.pad(u, [(0, 0), (0, tail)] + [(0, 0)] * (u.ndim - 2), mode=mode)
    return u.reshape(u.shape[0], -1, size, *u.shape[2:])


def _init_dt_bias(key, shape, dtype=jnp.float32):
    """softplus^-1 of step sizes spread evenly in logarithm over 0.001 .. 0.1."""
    dt = jnp.exp(jax.random.uniform(key, shape, dtype, jnp.log(1e-3), jnp.log(1e-1)))
    return dt + jnp.log(-jnp.expm1(-dt))


def _init_a_log(key, shape, dtype=jnp.float32):
    """log of decay rates spread evenly over 1 .. 16."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))


class Mamba2(nn.Module):
    """x -> x + W_out norm(ssd(...) * silu(z)), section 7.1 of the paper; x [B, S/tp, H].

    The projections stand apart (the paper's code joins them), so that each is split over `model` by heads or
    groups. The gated RMSNorm is one for each group, so a device normalises its own groups. Parameters with
    one number a head or channel are vectors, by groups, so that a device holds a contiguous part.
    """

    hidden: int
    heads: int
    head_dim: int
    groups: int
    state: int
    conv_width: int
    chunk: int
    blocks: int
    norm_eps: float
    tp: int = 1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, values: Values, batch: Batch):
        groups, per_group = self.groups // self.tp, self.heads // self.groups
        inner = (groups, per_group, self.head_dim)
        norm = self.param("norm", nn.initializers.ones, (self.hidden,))
        n = gather_sequence(rms_norm(values["x"], norm, self.norm_eps), self.tp)
        runs = run_numbers(batch["segments"])

        z = self._project("z", n, inner)
        x = self._conv("conv_x", self._project("x", n, inner), runs)
        b = self._conv("conv_b", self._project("b", n, (groups, self.state)), runs)
        c = self._conv("conv_c", self._project("c", n, (groups, self.state)), runs)
        dt = self._project("dt", n, (groups, per_group)).astype(jnp.float32)
        dt = jax.nn.softplus(dt + self._vector("dt_bias", _init_dt_bias, (groups, per_group)))
        a = -jnp.exp(self._vector("a_log", _init_a_log, (groups, per_group)))

        y = ssd(x, dt, a, b, c, runs, self.chunk)
        y = y + x * self._vector("skip", nn.initializers.ones, (groups, per_group))[..., None]
        y = y.astype(self.dtype) * nn.silu(z)
        gated = y.reshape(*y.shape[:3], per_group * self.head_dim)
        gate_norm = self._vector("gate_norm", nn.initializers.ones, gated.shape[2:])
        y = rms_norm(gated, gate_norm, self.norm_eps).reshape(y.shape)
        std = residual_std(self.heads * self.head_dim, self.blocks)
        out = self.param("out", normal(std, ("model", None, None, None)), (*inner, self.hidden))
        return {"x": values["x"] + scatter_sequence(project("bsgrp,grph->bsh", y, out), self.tp)}, {}

    def _project(self, name: str, n: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """n [B, S, H] times a parameter [H, *shape], of which the first of `shape` is split."""
        init = normal(self.hidden**-0.5, (None, "model", *[None] * (len(shape) - 1)))
        w = self.param(name, init, (self.hidden, *shape))
        return project(f"bsh,h{'grp'[: len(shape)]}->bs{'grp'[: len(shape)]}", n, w)

    def _conv(self, name: str, u: jax.Array, runs: jax.Array) -> jax.Array:
        """`causal_conv` of u [B, S, G, ...] with a kernel and a bias of its own."""
        shape = u.shape[2:]
        split = (None, "model", *[None] * (len(shape) - 1))
        init = nn.with_partitioning(_symmetric_uniform(self.conv_width**-0.5), split)
        kernel = self.param(name, init, (self.conv_width, *shape))
        return causal_conv(u, kernel, self._vector(f"{name}_bias", nn.initializers.zeros, shape), runs)

    def _vector(self, name: str, init, shape: tuple[int, ...]) -> jax.Array:
        """A parameter stored as a vector (see `code.compute_copy`) in the shape [G, ...] of its use."""
        return self.param(name, nn.with_partitioning(init, ("model",)), (math.prod(shape),)).reshape(shape)


def _symmetric_uniform(bound: float):
    return lambda key, shape, dtype=jnp.float32: jax.random.uniform(key, shape, dtype, -bound, bound)
