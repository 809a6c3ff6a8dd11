"""Exact attention in plain JAX, block by block, so that memory grows linearly with length.

Forward is the online softmax (FlashAttention-2, arXiv 2307.08691, algorithm 1), backward recomputes
the scores of a block from the log-sum-exp (algorithm 2). One scan visits the pairs of a query block and
a key block that the mask does not rule out; a sequence of one block needs no scan.

Shape letters as in `spec`, and G = N / K query heads for each key head, I and J blocks of queries and
keys, R and C rows (queries) and columns (keys) in a block.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels.attention.spec import AttentionSpec, check_shapes

BLOCK = 512
"""Queries and keys in a block."""

_F32 = jnp.float32


class _Blocks(NamedTuple):
    """Everything cut into blocks, which lead the shapes."""

    q: jax.Array  # [I, B, K, G, R, D]
    k: jax.Array  # [J, B, K, C, D]
    v: jax.Array  # [J, B, K, C, Dv]
    segments: tuple[jax.Array, jax.Array] | None  # int32 [I, B, R], [J, B, C]
    keys: int  # T, to mask the padding of the last block


def forward(q, k, v, spec: AttentionSpec, segments=None, block: int = BLOCK):
    """Attention and its log-sum-exp.

    Args:
      q: [B, S, N, D].
      k: [B, T, K, D], N a multiple of K: query head n reads key head n // (N / K).
      v: [B, T, K, Dv].
      spec: mask, soft cap and scale.
      segments: int32[B, S] or None; tokens see equal ids only (then T = S).
      block: queries and keys in a block.

    Returns:
      o: [B, S, N, Dv] in q's dtype; 0 where a query sees no key.
      lse: float32[B, N, S], natural logarithm; -inf where a query sees no key.

    Raises:
      ValueError: when shapes do not fit together.
    """
    check_shapes(q, k, v, segments)
    blocks = _cut(q, k, v, segments, block)

    def visit(state, i, j):
        o, m, l = (_take(x, i) for x in state)
        s = _scores(blocks, spec, i, j)[0]
        m_new = jnp.maximum(m, s.max(-1))
        safe = _finite(m_new)
        p = jnp.exp(s - safe[..., None])
        decay = jnp.exp(m - safe)
        v_j = _take(blocks.v, j)
        o = o * decay[..., None] + _dot("bkgrc,bkcd->bkgrd", p.astype(v_j.dtype), v_j)
        return (o, m_new, l * decay + p.sum(-1)), (i, i, i)

    row_shape = blocks.q.shape[:-1]
    o, l = _like_all((q, k, v, segments), 0, ((*row_shape, v.shape[-1]), row_shape))
    (m,) = _like_all((q, k, v, segments), -jnp.inf, (row_shape,))
    o, m, l = _visit_pairs(visit, (o, m, l), _pairs(blocks, spec))
    lse = _finite(m) + jnp.log(l)
    o = o / jnp.where(l == 0, 1, l)[..., None]
    return _join_rows(o.astype(q.dtype), q.shape[1]), _join_lse(lse, q.shape[1])


def backward(q, k, v, o, lse, do, spec: AttentionSpec, segments=None, block: int = BLOCK):
    """Gradients of sum(o * do) from what `forward` took and gave.

    Args:
      q, k, v, spec, segments, block: as for `forward`.
      o, lse: what `forward` returned.
      do: [B, S, N, Dv], cotangent of o.

    Returns:
      dq, dk, dv with shapes and dtypes of q, k, v; accumulated in float32.

    Raises:
      ValueError: when shapes do not fit together.
    """
    check_shapes(q, k, v, segments)
    blocks = _cut(q, k, v, segments, block)
    delta = jnp.sum(o.astype(_F32) * do.astype(_F32), -1)  # [B, S, N]
    rows, groups = blocks.q.shape[4], blocks.q.shape[3]
    do_IxBxKxGxRxD = _cut_rows(do.astype(v.dtype), rows, groups)
    delta_IxBxKxGxR = _cut_rows(delta[..., None], rows, groups)[..., 0]
    lse_IxBxKxGxR = _finite(_cut_rows(lse.transpose(0, 2, 1)[..., None], rows, groups)[..., 0])
    scale = spec.scale_of(q.shape[-1])

    def visit(state, i, j):
        dq, dk, dv = (_take(x, n) for x, n in zip(state, (i, j, j)))
        q_i, k_j, v_j, do_i = (
            _take(x, n) for x, n in ((blocks.q, i), (blocks.k, j), (blocks.v, j), (do_IxBxKxGxRxD, i))
        )
        s, slope = _scores(blocks, spec, i, j)
        p = jnp.exp(s - _take(lse_IxBxKxGxR, i)[..., None])
        dp = _dot("bkgrd,bkcd->bkgrc", do_i, v_j)
        ds = p * (dp - _take(delta_IxBxKxGxR, i)[..., None]) * scale
        if slope is not None:
            ds = ds * slope
        ds = ds.astype(q_i.dtype)
        dq = dq + _dot("bkgrc,bkcd->bkgrd", ds, k_j)
        dk = dk + _dot("bkgrc,bkgrd->bkcd", ds, q_i)
        dv = dv + _dot("bkgrc,bkgrd->bkcd", p.astype(do_i.dtype), do_i)
        return (dq, dk, dv), (i, j, j)

    start = _like_all((q, k, v, do, segments), 0, [x.shape for x in (blocks.q, blocks.k, blocks.v)])
    dq, dk, dv = _visit_pairs(visit, start, _pairs(blocks, spec))
    return tuple(
        _join_rows(dx, x.shape[1]).astype(x.dtype)
        for dx, x in ((dq, q), (dk[:, :, :, None], k), (dv[:, :, :, None], v))
    )


def _scores(blocks: _Blocks, spec: AttentionSpec, i, j):
    """Masked scores float32[B, K, G, R, C] of a pair, and the slope of the soft cap (None without one)."""
    q_i, k_j = _take(blocks.q, i), _take(blocks.k, j)
    s = _dot("bkgrd,bkcd->bkgrc", q_i, k_j) * spec.scale_of(q_i.shape[-1])
    slope = None
    if spec.soft_cap is not None:
        t = jnp.tanh(s / spec.soft_cap)
        s, slope = spec.soft_cap * t, 1 - t * t
    rows, cols = s.shape[-2:]
    row = i * rows + lax.broadcasted_iota(jnp.int32, (rows, cols), 0)
    col = j * cols + lax.broadcasted_iota(jnp.int32, (rows, cols), 1)
    seen = col < blocks.keys
    if spec.causal:
        seen &= col <= row
    if spec.window is not None:
        seen &= row - col < spec.window
    if blocks.segments is not None:
        row_ids, col_ids = _take(blocks.segments[0], i), _take(blocks.segments[1], j)
        seen = seen & (row_ids[:, :, None] == col_ids[:, None, :])
        seen = seen[:, None, None]
    return jnp.where(seen, s, -jnp.inf), slope


def _pairs(blocks: _Blocks, spec: AttentionSpec) -> np.ndarray:
    """int32[pairs, 2]: the pairs (i, j) of blocks in which the mask leaves something to see."""
    rows, cols = blocks.q.shape[4], blocks.k.shape[3]
    i, j = np.meshgrid(np.arange(blocks.q.shape[0]), np.arange(blocks.k.shape[0]), indexing="ij")
    seen = np.ones(i.shape, bool)
    if spec.causal:
        seen &= j * cols <= (i + 1) * rows - 1
    if spec.window is not None:
        seen &= i * rows - ((j + 1) * cols - 1) < spec.window
    return np.stack([i[seen], j[seen]], -1).astype(np.int32)


def _visit_pairs(visit, state, pairs: np.ndarray):
    """Runs `visit(state, i, j) -> (blocks, places)` over all pairs and writes each block to its place."""

    def write(state, i, j):
        new, places = visit(state, i, j)
        return tuple(lax.dynamic_update_index_in_dim(s, n, at, 0) for s, n, at in zip(state, new, places))

    if len(pairs) == 1 and all(s.shape[0] == 1 for s in state):
        new, _ = visit(state, 0, 0)
        return tuple(n[None] for n in new)
    return lax.scan(lambda state, ij: (write(state, ij[0], ij[1]), None), state, pairs)[0]


def _cut(q, k, v, segments, block: int) -> _Blocks:
    """Cuts everything into blocks of at most `block`, the tails padded with zeros."""
    rows, cols = min(block, q.shape[1]), min(block, k.shape[1])
    if segments is not None:
        segments = tuple(_cut_rows(segments[..., None, None], n, 1)[:, :, 0, 0, :, 0] for n in (rows, cols))
    return _Blocks(
        q=_cut_rows(q, rows, q.shape[2] // k.shape[2]),
        k=_cut_rows(k, cols, 1)[:, :, :, 0],
        v=_cut_rows(v, cols, 1)[:, :, :, 0],
        segments=segments,
        keys=k.shape[1],
    )


def _cut_rows(x, rows: int, groups: int):
    """[B, S, N, D] -> [I, B, N / groups, groups, rows, D], padded with zeros."""
    b, s, n, d = x.shape
    count = -(-s // rows)
    if count * rows != s:
        x = jnp.pad(x, ((0, 0), (0, count * rows - s), (0, 0), (0, 0)))
    return x.reshape(b, count, rows, n // groups, groups, d).transpose(1, 0, 3, 4, 2, 5)


def _join_rows(x, length: int):
    """The inverse of `_cut_rows`."""
    i, b, k, g, r, d = x.shape
    return x.transpose(1, 0, 4, 2, 3, 5).reshape(b, i * r, k * g, d)[:, :length]


def _join_lse(x, length: int):
    """[I, B, K, G, R] -> [B, N, S]."""
    return _join_rows(x[..., None], length)[..., 0].transpose(0, 2, 1)


def _take(x, i):
    """x[i], with a static slice for a static index."""
    return x[i] if isinstance(i, int) else lax.dynamic_index_in_dim(x, i, 0, keepdims=False)


def _dot(formula: str, x, y):
    return jnp.einsum(formula, x, y, preferred_element_type=_F32)


def _finite(m):
    """0 in place of -inf, so that a row that sees nothing gives exp(-inf - 0) = 0 and no NaN."""
    return jnp.where(jnp.isneginf(m), 0, m)


def _like_all(operands, value: float, shapes):
    """float32 constants for a scan's carry, varying over every mesh axis that an operand varies over.

    Inside `shard_map` a carry must start with the type that the scan gives it.
    """
    zero = sum(lax.full_like(x, 0, _F32, ()) for x in operands if x is not None)
    return tuple(lax.full_like(zero, value, _F32, shape) for shape in shapes)
