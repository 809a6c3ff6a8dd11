"""Attention: `forward` and `backward` on plain arrays, and `attention`, which is differentiable."""

import functools

import jax

from kernels.attention.reference import backward, forward
from kernels.attention.spec import AttentionSpec

__all__ = ["AttentionSpec", "attention", "backward", "forward"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, segments: jax.Array | None = None
):
    """Attention output [B, S, N, Dv] in q's dtype; arguments as for `forward`.

    Its residuals are q, k, v, o, lse and segments, and nothing else.
    """
    return forward(q, k, v, spec, segments)[0]


def _attention_fwd(q, k, v, spec, segments):
    o, lse = forward(q, k, v, spec, segments)
    return o, (q, k, v, o, lse, segments)


def _attention_bwd(spec, residuals, do):
    q, k, v, o, lse, segments = residuals
    return (*backward(q, k, v, o, lse, do, spec, segments), None)


attention.defvjp(_attention_fwd, _attention_bwd)
