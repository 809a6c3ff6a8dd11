"""What an attention computes, and the checks that every implementation shares.

Shape letters: B sequences, S queries, T keys, N query heads, K key heads (N a multiple of K),
D size of a query or key head, Dv size of a value head.
"""

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class AttentionSpec:
    """The static part of an attention. Query i and key j stand at positions i and j.

    causal: query i sees key j only if j <= i.
    window: query i sees key j only if 0 <= i - j < window (Longformer, arXiv 2004.05150); needs `causal`.
    soft_cap: scores s become soft_cap * tanh(s / soft_cap) (Gemma 2, arXiv 2408.00118, section 2).
    scale: factor on q·k before the soft cap; None stands for D**-0.5.

    Raises ValueError where a field makes no sense.
    """

    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None

    def __post_init__(self):
        if self.window is not None and not self.causal:
            raise ValueError(f"window is {self.window} while causal is False; a window needs causal=True")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}; expected at least 1 or None")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(f"soft_cap is {self.soft_cap}; expected a positive number or None")

    def scale_of(self, head_dim: int) -> float:
        """The factor on q·k for heads of size `head_dim`."""
        return head_dim**-0.5 if self.scale is None else self.scale


def check_shapes(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> None:
    """Raises ValueError unless q [B,S,N,D], k [B,T,K,D], v [B,T,K,Dv] and segments [B,S] fit together."""
    if not (q.ndim == k.ndim == v.ndim == 4):
        raise ValueError(f"q, k and v have shapes {q.shape}, {k.shape}, {v.shape}; expected four dimensions")
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(f"k has shape {k.shape} and q {q.shape}; batch and head size must be equal")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v has shape {v.shape} and k {k.shape}; the first three dimensions must be equal")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads are no multiple of {k.shape[2]} key heads")
    if segments is not None and not (segments.shape == q.shape[:2] == k.shape[:2]):
        raise ValueError(
            f"segments have shape {segments.shape}; queries need {q.shape[:2]} and keys {k.shape[:2]}"
        )
