"""A self-attention layer as three pieces: before, the attention itself, after.

Shape letters: B sequences, S tokens, H hidden size, N query heads, K key heads, D head size.
The attention itself has no parameters, so it can be placed away from the other two.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxpipe.models.collectives import gather_sequence, scatter_sequence
from jaxpipe.models.layers import normal, project, residual_std, rms_norm
from jaxpipe.models.piece import Batch, Piece, Values
from kernels.attention import AttentionSpec, attention


def rotate(x_BxSxNxD: jax.Array, positions_BxS: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding (arXiv 2104.09864, equation 34), the pair of channel c being c + D/2.

    Channels c and c + D/2 turn by position * theta^(-2c/D). Angles and products in float32; x's dtype.
    """
    half = x_BxSxNxD.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions_BxS[:, :, None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x_BxSxNxD[..., :half].astype(jnp.float32), x_BxSxNxD[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BxSxNxD.dtype)


class AttentionPre(nn.Module):
    """x [B, S/tp, H] -> q [B, S, N/tp, D], k and v [B, S, K/tp, D]: RMSNorm, projections, rotation.

    rope_theta: base of the rotary frequencies; None leaves q and k as they are.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float | None = None
    tp: int = 1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, values: Values, batch: Batch):
        init = normal(self.hidden**-0.5, (None, "model", None))
        scale = self.param("norm", nn.initializers.ones, (self.hidden,))
        n = gather_sequence(rms_norm(values["x"], scale, self.norm_eps), self.tp)
        written = {}
        for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            w = self.param(name, init, (self.hidden, heads // self.tp, self.head_dim))
            written[name] = project("bsh,hnd->bsnd", n, w)
        if self.rope_theta is not None:
            written |= {n: rotate(written[n], batch["positions"], self.rope_theta) for n in ("q", "k")}
        return written, {}


class AttentionCore(nn.Module):
    """q [B, S, N/tp, D], k and v [B, S, K/tp, D] -> o [B, S, N/tp, D]: causal attention within documents."""

    window: int | None = None
    soft_cap: float | None = None
    tp: int = 1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, values: Values, batch: Batch):
        spec = AttentionSpec(causal=True, window=self.window, soft_cap=self.soft_cap)
        return {"o": attention(values["q"], values["k"], values["v"], spec, batch["segments"])}, {}


class AttentionPost(nn.Module):
    """x [B, S/tp, H], o [B, S, N/tp, D] -> x + W_out o."""

    hidden: int
    heads: int
    head_dim: int
    blocks: int
    tp: int = 1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, values: Values, batch: Batch):
        init = normal(residual_std(self.heads * self.head_dim, self.blocks), ("model", None, None))
        out = self.param("out", init, (self.heads // self.tp, self.head_dim, self.hidden))
        return {"x": values["x"] + scatter_sequence(project("bsnd,ndh->bsh", values["o"], out), self.tp)}, {}


def attention_pieces(
    name: str, pre: AttentionPre, core: AttentionCore, post: AttentionPost
) -> tuple[Piece, ...]:
    """The three pieces of layer `name`."""
    return (
        Piece(f"{name}/pre", "attention_pre", pre, ("x",), ("q", "k", "v")),
        Piece(f"{name}/attention", "attention_core", core, ("q", "k", "v"), ("o",)),
        Piece(f"{name}/post", "attention_post", post, ("x", "o"), ("x",)),
    )
