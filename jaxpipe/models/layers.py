"""Embedding, RMSNorm and the two MLP blocks.

Shape letters: B sequences, S tokens, H hidden size, M columns of an MLP, V vocabulary.
All sizes of a module are global; with `tp` > 1 its parameters and values are one device's shard.
Matrices are float32 or already in the compute dtype and are cast where they are used; vectors are float32.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.models.collectives import device_index, gather_sequence, scatter_sequence
from jaxpipe.models.piece import Batch, Values

TABLE_STD = 0.02
"""Standard deviation of embedding and vocabulary tables at the start."""


def normal(std: float, names: tuple[str | None, ...]):
    """Initialiser: normal with deviation `std`, split over the mesh axes `names`."""
    return nn.with_partitioning(nn.initializers.normal(std), names)


def residual_std(fan_in: int, blocks: int) -> float:
    """Deviation of the last matrix of a block: the sum of `blocks` residual branches keeps its size.

    1 / sqrt(fan_in) as for any matrix, over sqrt(blocks) (GPT-2; with two blocks a layer, sqrt(2 layers)).
    """
    return (fan_in * blocks) ** -0.5


def project(formula: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """einsum of x and a parameter in x's dtype.

    Hardware sums bfloat16 products in float32 and rounds once. Asking for a float32 result would make the
    cotangents float32, and with them both matmuls of the backward.
    """
    return jnp.einsum(formula, x, w.astype(x.dtype))


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * scale over the last axis in float32, given in x's dtype (arXiv 1910.07467, equation 4)."""
    wide = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return (wide * inverse * scale.astype(jnp.float32)).astype(x.dtype)


class Embedding(nn.Module):
    """tokens -> x [B, S/tp, H]: rows of a table [V, H] whose rows are split over `model`."""

    vocab: int
    hidden: int
    tp: int = 1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, values: Values, batch: Batch):
        rows = self.vocab // self.tp
        table = self.param("table", normal(TABLE_STD, ("model", None)), (rows, self.hidden))
        local = batch["tokens"] - device_index(self.tp) * rows
        # A token of another device's rows falls outside this table and reads zeros.
        x = table.at[local].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        return {"x": scatter_sequence(x.astype(self.dtype), self.tp)}, {}


class SwiGLU(nn.Module):
    """x + W_down(silu(W_gate n) * W_up n), n = RMSNorm(x) (arXiv 2002.05202, equation 6). x [B, S/tp, H]."""

    hidden: int
    mlp_hidden: int
    blocks: int
    norm_eps: float
    tp: int = 1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, values: Values, batch: Batch):
        x, columns = values["x"], self.mlp_hidden // self.tp
        first = normal(self.hidden**-0.5, (None, "model"))
        last = normal(residual_std(self.mlp_hidden, self.blocks), ("model", None))
        scale = self.param("norm", nn.initializers.ones, (self.hidden,))
        gate = self.param("gate", first, (self.hidden, columns))
        up = self.param("up", first, (self.hidden, columns))
        down = self.param("down", last, (columns, self.hidden))
        n = gather_sequence(rms_norm(x, scale, self.norm_eps), self.tp)
        h = nn.silu(project("bsh,hm->bsm", n, gate)) * project("bsh,hm->bsm", n, up)
        return {"x": x + scatter_sequence(project("bsm,mh->bsh", h, down), self.tp)}, {}


class SquaredReLU(nn.Module):
    """x + W_down relu(W_up n)^2, n = RMSNorm(x) (Primer, arXiv 2109.08668, section 4). x [B, S/tp, H]."""

    hidden: int
    mlp_hidden: int
    blocks: int
    norm_eps: float
    tp: int = 1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, values: Values, batch: Batch):
        x, columns = values["x"], self.mlp_hidden // self.tp
        last = normal(residual_std(self.mlp_hidden, self.blocks), ("model", None))
        scale = self.param("norm", nn.initializers.ones, (self.hidden,))
        up = self.param("up", normal(self.hidden**-0.5, (None, "model")), (self.hidden, columns))
        down = self.param("down", last, (columns, self.hidden))
        n = gather_sequence(rms_norm(x, scale, self.norm_eps), self.tp)
        h = nn.relu(project("bsh,hm->bsm", n, up))
        return {"x": x + scatter_sequence(project("bsm,mh->bsh", h * h, down), self.tp)}, {}
