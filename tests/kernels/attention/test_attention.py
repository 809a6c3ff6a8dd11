"""The blockwise attention against a plain softmax, which materialises every score, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from kernels.attention import AttentionSpec, attention, backward, forward
from kernels.attention.reference import _cut, _pairs


def seen_pairs(s, t, spec, segments):
    """bool[B or 1, S, T], written from the words of the specification."""
    batch = 1 if segments is None else len(segments)
    seen = np.ones((batch, s, t), bool)
    for b in range(batch):
        for i in range(s):
            for j in range(t):
                if spec.causal and j > i:
                    seen[b, i, j] = False
                if spec.window is not None and not 0 <= i - j < spec.window:
                    seen[b, i, j] = False
                if segments is not None and segments[b, i] != segments[b, j]:
                    seen[b, i, j] = False
    return seen


@functools.partial(jax.jit, static_argnames="soft_cap")
def plain(q, k, v, do, seen, scale, soft_cap):
    """o, lse and (dq, dk, dv) of softmax attention with repeated key heads; empty rows give 0 and -inf."""
    group = q.shape[2] // k.shape[2]
    some = seen.any(-1)[:, None, :, None]

    def attend(q, k, v):
        k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
        s = jnp.einsum("bind,bjnd->bnij", q, k) * scale
        if soft_cap is not None:
            s = soft_cap * jnp.tanh(s / soft_cap)
        s = jnp.where(seen[:, None], s, jnp.where(some, -jnp.inf, 0.0))
        p = jnp.where(some, jax.nn.softmax(s, -1), 0.0)
        return jnp.einsum("bnij,bjnd->bind", p, v), jnp.where(some[..., 0], jax.nn.logsumexp(s, -1), -jnp.inf)

    o, pull, lse = jax.vjp(attend, q, k, v, has_aux=True)
    return o, lse, pull(do)


def operands(s, t, n=4, k=2, d=8, dv=6, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = [(2, s, n, d), (2, t, k, d), (2, t, k, dv), (2, s, n, dv)]
    return [jnp.asarray(rng.normal(size=x), dtype) for x in shapes]


def documents(s, seed=1):
    """Two rows of consecutive documents of random lengths."""
    rng = np.random.default_rng(seed)
    return np.cumsum(rng.random((2, s)) < 4 / s, axis=1).astype(np.int32)


SPECS = {
    "full": AttentionSpec(causal=False),
    "causal": AttentionSpec(),
    "window": AttentionSpec(window=5),
    "cap": AttentionSpec(soft_cap=0.7),
    "scale": AttentionSpec(causal=False, scale=0.31),
    "all": AttentionSpec(window=9, soft_cap=2.0, scale=0.6),
}


CASES = [(name, 37, 37, True, 16) for name in SPECS] + [
    ("full", 37, 37, False, 64),
    ("all", 37, 37, True, 64),
    ("full", 41, 19, False, 16),
    ("all", 41, 19, False, 16),
    ("causal", 19, 41, False, 16),
    ("full", 1, 41, False, 16),
]


@pytest.mark.parametrize(("name", "s", "t", "packed", "block"), CASES)
def test_matches_plain_softmax(name, s, t, packed, block):
    spec, segments = SPECS[name], documents(s) if packed else None
    inputs = operands(s, t)
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) for x in inputs]
        scale = 8**-0.5 if spec.scale is None else spec.scale
        want = plain(*wide, seen_pairs(s, t, spec, segments), scale, spec.soft_cap)

    @jax.jit
    def both(q, k, v, do):
        o, lse = forward(q, k, v, spec, segments, block)
        return o, lse, backward(q, k, v, o, lse, do, spec, segments, block)

    for got, right in zip(jax.tree.leaves(both(*inputs)), jax.tree.leaves(want)):
        np.testing.assert_allclose(got, np.asarray(right), atol=5e-6, rtol=5e-5)


def test_rows_that_see_nothing():
    # With a window of 4 and four keys, query 7 and those after it have no key to see.
    q, k, v, do = operands(12, 4)
    spec = AttentionSpec(window=4)
    o, lse = jax.jit(lambda q, k, v: forward(q, k, v, spec, block=4))(q, k, v)
    assert np.all(np.asarray(o)[:, 7:] == 0)
    assert np.all(np.isneginf(np.asarray(lse)[:, :, 7:]))
    assert np.all(np.isfinite(np.asarray(lse)[:, :, :7]))
    for x in jax.jit(jax.grad(lambda *a: jnp.vdot(attention(*a, spec), do), (0, 1, 2)))(q, k, v):
        assert np.all(np.isfinite(x))


def test_gradient_and_residuals():
    q, k, v, do = operands(13, 13)
    spec, segments = AttentionSpec(soft_cap=3.0), jnp.asarray(documents(13))

    @jax.jit
    def both(q, k, v):
        o, lse = forward(q, k, v, spec, segments)
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, spec, segments), q, k, v)
        return pull, (out, *pull(do)), (o, *backward(q, k, v, o, lse, do, spec, segments))

    pull, ours, direct = both(q, k, v)
    for x, y in zip(ours, direct):
        np.testing.assert_allclose(x, y, rtol=1e-6)
    lse, o = (2, 4, 13), (2, 13, 4, 6)
    kept = sorted(x.shape for x in jax.tree.leaves(pull))
    assert kept == sorted((q.shape, k.shape, v.shape, o, lse, segments.shape))


def test_bfloat16_keeps_float32_sums():
    q, k, v, do = operands(70, 70, dtype=jnp.bfloat16)
    spec = AttentionSpec()
    seen = seen_pairs(70, 70, spec, None)
    wide = (x.astype(jnp.float32) for x in (q, k, v, do))
    want, want_lse, _ = plain(*wide, seen, 8**-0.5, None)
    o, lse = jax.jit(lambda q, k, v: forward(q, k, v, spec, block=32))(q, k, v)
    assert (o.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(o.astype(jnp.float32), want, atol=0.02)
    grads = jax.eval_shape(lambda *a: backward(*a, spec), q, k, v, o, lse, do)
    assert [g.dtype for g in grads] == [jnp.bfloat16] * 3


def test_blocks_out_of_sight_are_not_visited():
    q, k, v, _ = operands(64, 64)
    blocks = _cut(q, k, v, None, 16)
    assert len(_pairs(blocks, AttentionSpec(causal=False))) == 16
    assert len(_pairs(blocks, AttentionSpec())) == 10
    # A window of 16 reaches from the first row of a block into the block before, and no further.
    assert len(_pairs(blocks, AttentionSpec(window=16))) == 7
    assert len(_pairs(blocks, AttentionSpec(window=1))) == 4


def test_no_array_grows_with_the_square_of_the_length():
    q, k, v, do = operands(2048, 2048, n=2, k=1, d=4, dv=4)
    run = jax.jit(jax.value_and_grad(lambda *a: jnp.vdot(attention(*a, AttentionSpec()), do), (0, 1, 2)))
    memory = run.lower(q, k, v).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2 * 2 * 2048 * 2048 * 4 / 2  # half of one array of all scores


@pytest.mark.parametrize("block", [8, 512])
def test_inside_shard_map(block):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    q, k, v, do = operands(20, 20)
    spec, segments = AttentionSpec(), jnp.asarray(documents(20))

    def local(q, k, v, do, segments):
        o, lse = forward(q, k, v, spec, segments, block)

        def loss(*a):
            return jnp.vdot(attention(*a, spec, segments), do)

        return o, jax.grad(loss, (0, 1, 2))(q, k, v), backward(q, k, v, o, lse, do, spec, segments, block)

    heads = P("data", None, "model")
    specs = {"in_specs": (heads,) * 4 + (P("data"),), "out_specs": (heads, (heads,) * 3, (heads,) * 3)}
    o, grads, blockwise = jax.jit(jax.shard_map(local, mesh=mesh, check_vma=True, **specs))(
        q, k, v, do, segments
    )
    seen = seen_pairs(20, 20, spec, np.asarray(segments))
    want, _, want_grads = plain(q, k, v, do, seen, 8**-0.5, None)
    np.testing.assert_allclose(o, want, atol=1e-6)
    for got in (grads, blockwise):
        for x, y in zip(got, want_grads):
            np.testing.assert_allclose(x, y, atol=5e-6)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"causal": False, "window": 4}, "needs causal=True"),
        ({"window": 0}, "window is 0"),
        ({"soft_cap": 0.0}, "soft_cap is 0.0"),
    ],
)
def test_bad_spec(fields, words):
    with pytest.raises(ValueError, match=words):
        AttentionSpec(**fields)


def test_bad_shapes():
    q, k, v, _ = operands(8, 6)
    with pytest.raises(ValueError, match="segments have shape"):
        forward(q, k, v, AttentionSpec(), jnp.zeros((2, 8), jnp.int32))
    with pytest.raises(ValueError, match="3 query heads are no multiple of 2"):
        forward(q[:, :, :3], k, v, AttentionSpec())
    with pytest.raises(ValueError, match="batch and head size"):
        forward(q[..., :4], k, v, AttentionSpec())
    with pytest.raises(ValueError, match="first three dimensions"):
        forward(q, k, v[:, :5], AttentionSpec())
