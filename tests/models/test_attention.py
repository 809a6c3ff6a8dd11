"""Rotary embedding and the three pieces of an attention layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.models.attention import AttentionCore, AttentionPost, AttentionPre, rotate


def test_rotation_is_a_complex_product():
    rng = np.random.default_rng(0)
    x, positions = rng.normal(size=(2, 5, 3, 8)), rng.integers(0, 1000, (2, 5))
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(
        1j * positions[:, :, None, None] * 500.0 ** -(np.arange(4) / 4)
    )
    got = rotate(jnp.asarray(x, jnp.float32), jnp.asarray(positions), 500.0)
    np.testing.assert_allclose(got, np.concatenate([turned.real, turned.imag], -1), atol=2e-4)


def test_scores_depend_on_relative_positions():
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 16)), jnp.float32) for _ in range(2))

    def score(i, j):
        i, j = jnp.full((1, 1), i), jnp.full((1, 1), j)
        return jnp.vdot(rotate(q, i, 1e4), rotate(k, j, 1e4))

    np.testing.assert_allclose(score(7, 3), score(104, 100), rtol=1e-4)
    np.testing.assert_allclose(score(3, 7), score(0, 4), rtol=1e-4)
    assert abs(score(7, 3) - score(3, 7)) > 1e-2
    np.testing.assert_array_equal(rotate(q, jnp.zeros((1, 1), jnp.int32), 1e4), q)


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (3, 1.0)])
def test_pieces_together(window, soft_cap):
    rng = np.random.default_rng(2)
    s, h, n, k, d = 9, 8, 4, 2, 6
    x = rng.normal(size=(1, s, h))
    shapes = {"norm": (h,), "q": (h, n, d), "k": (h, k, d), "v": (h, k, d), "out": (n, d, h)}
    w = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    segments = np.array([[0, 0, 0, 0, 0, 0, 1, 1, 1]])

    normed = x[0] / np.sqrt((x[0] ** 2).mean(-1, keepdims=True) + 1e-5) * w["norm"]
    want = x[0].copy()
    for head in range(n):
        q, key, v = normed @ w["q"][:, head], normed @ w["k"][:, head // 2], normed @ w["v"][:, head // 2]
        for i in range(s):
            first = max(0 if i < 6 else 6, 0 if window is None else i - window + 1)
            scores = key[first : i + 1] @ q[i] / np.sqrt(d)
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            p = np.exp(scores - scores.max())
            want[i] += p / p.sum() @ v[first : i + 1] @ w["out"][head]

    values, batch = {"x": jnp.asarray(x, jnp.float32)}, {"segments": jnp.asarray(segments)}
    w = {name: jnp.asarray(u, jnp.float32) for name, u in w.items()}
    pre = {name: w[name] for name in ("norm", "q", "k", "v")}
    values |= AttentionPre(h, n, k, d, 1e-5).apply({"params": pre}, values, batch)[0]
    values |= AttentionCore(window, soft_cap).apply({}, values, batch)[0]
    out = AttentionPost(h, n, d, 2).apply({"params": {"out": w["out"]}}, values, batch)[0]
    np.testing.assert_allclose(out["x"][0], want, rtol=1e-4, atol=1e-4)
    assert jax.tree.map(jnp.shape, values)["q"] == (1, s, n, d)
