"""Embedding and MLP blocks against their formulas in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.models.collectives import scatter_sequence
from jaxpipe.models.layers import Embedding, SquaredReLU, SwiGLU

H, M = 6, 10


def norm(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale


def weights(names):
    rng = np.random.default_rng(0)
    shapes = {"norm": (H,), "gate": (H, M), "up": (H, M), "down": (M, H)}
    return {name: rng.normal(size=shapes[name]) for name in names}, rng.normal(size=(2, 5, H))


def apply(module, params, x):
    params = {name: jnp.asarray(w, jnp.float32) for name, w in params.items()}
    return module.apply({"params": params}, {"x": jnp.asarray(x, jnp.float32)}, {})[0]["x"]


def test_swiglu():
    w, x = weights(("norm", "gate", "up", "down"))
    n = norm(x, w["norm"])
    gate = n @ w["gate"]
    want = x + (gate / (1 + np.exp(-gate)) * (n @ w["up"])) @ w["down"]
    np.testing.assert_allclose(apply(SwiGLU(H, M, 2, 1e-5), w, x), want, rtol=1e-4, atol=1e-4)


def test_squared_relu():
    w, x = weights(("norm", "up", "down"))
    want = x + np.maximum(norm(x, w["norm"]) @ w["up"], 0) ** 2 @ w["down"]
    np.testing.assert_allclose(apply(SquaredReLU(H, M, 2, 1e-5), w, x), want, rtol=1e-4, atol=1e-4)


def test_embedding_gradient_counts_tokens():
    module, batch = Embedding(7, H), {"tokens": jnp.array([[3, 3, 0], [6, 3, 0]])}
    table = jnp.arange(7.0 * H).reshape(7, H)

    def total(table):
        x = module.apply({"params": {"table": table}}, {}, batch)[0]["x"]
        return x.sum(), x

    grads, x = jax.grad(total, has_aux=True)(table)
    np.testing.assert_array_equal(x, np.asarray(table)[np.asarray(batch["tokens"])])
    np.testing.assert_array_equal(grads, np.repeat([[2], [0], [0], [3], [0], [0], [1]], H, 1))


def test_sequence_that_does_not_split():
    with pytest.raises(ValueError, match="9 tokens does not split over tp=2"):
        scatter_sequence(jnp.zeros((1, 9, 4)), 2)
