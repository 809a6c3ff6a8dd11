"""The chunked head against log-softmax over all logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.models.head import Head
from jaxpipe.models.layers import rms_norm

B, S, H, V = 2, 13, 8, 37


def case(seed=0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(B, S, H)), jnp.float32)
    params = {
        "norm": jnp.asarray(rng.uniform(0.5, 2, H), jnp.float32),
        "table": jnp.asarray(rng.normal(size=(V, H)), jnp.float32),
    }
    batch = {
        "targets": jnp.asarray(rng.integers(0, V, (B, S)), jnp.int32),
        "weights": jnp.asarray(rng.integers(0, 3, (B, S)) / 2, jnp.float32),
    }
    return params, x, batch


def plain(params, x, batch, soft_cap):
    logits = rms_norm(x, params["norm"], 1e-5) @ params["table"].T
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1)[..., 0]
    return jnp.sum(batch["weights"] * nll)


@pytest.mark.parametrize(("chunk", "soft_cap"), [(26, None), (1000, 1.5), (7, 1.5), (13, None), (1, None)])
def test_loss_and_gradients(chunk, soft_cap):
    params, x, batch = case()
    head = Head(V, H, chunk, 1e-5, soft_cap)

    def ours(params, x):
        return head.apply({"params": params}, {"x": x}, batch)[1]["nll"]

    # A factor checks that the cotangent reaches the gradients made in the forward pass.
    want = jax.jit(jax.value_and_grad(lambda p, x: 0.3 * plain(p, x, batch, soft_cap), (0, 1)))(params, x)
    got = jax.jit(jax.value_and_grad(lambda p, x: 0.3 * ours(p, x), (0, 1)))(params, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(0.3 * jax.jit(ours)(params, x), want[0], rtol=1e-6)


def count(jaxpr, primitive: str) -> int:
    """Equations of a primitive, those of inner jaxprs included."""
    inner = [j for e in jaxpr.eqns for j in jax.tree.leaves(e.params, is_leaf=lambda j: hasattr(j, "jaxpr"))]
    inner = [j.jaxpr for j in inner if hasattr(j, "jaxpr")]
    return sum(e.primitive.name == primitive for e in jaxpr.eqns) + sum(count(j, primitive) for j in inner)


@pytest.mark.parametrize("chunk", [8, 1000])
def test_three_matmuls_with_gradients_and_one_without(chunk):
    params, x, batch = case()
    head = Head(V, H, chunk, 1e-5)

    def loss(params, x):
        return head.apply({"params": params}, {"x": x}, batch)[1]["nll"]

    assert count(jax.make_jaxpr(jax.grad(loss, (0, 1)))(params, x).jaxpr, "dot_general") == 3
    assert count(jax.make_jaxpr(jax.jit(loss))(params, x).jaxpr, "dot_general") == 1


def test_all_logits_never_exist():
    tokens, vocab = 2048, 2048
    head = Head(vocab, H, 64, 1e-5)
    params = {"norm": jnp.ones(H), "table": jnp.ones((vocab, H))}
    batch = {"targets": jnp.zeros((1, tokens), jnp.int32), "weights": jnp.ones((1, tokens))}

    def loss(params, x):
        return head.apply({"params": params}, {"x": x}, batch)[1]["nll"]

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(params, jnp.ones((1, tokens, H))).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < tokens * vocab * 4 / 4


def test_bfloat16_values_float32_gradient_of_the_table():
    params, x, batch = case()
    head = Head(V, H, 8, 1e-5, dtype=jnp.bfloat16)

    def loss(params, x):
        return head.apply({"params": params}, {"x": x}, batch)[1]["nll"]

    value, (dparams, dx) = jax.jit(jax.value_and_grad(loss, (0, 1)))(params, x.astype(jnp.bfloat16))
    want, (want_params, _) = jax.value_and_grad(lambda p, x: plain(p, x, batch, None), (0, 1))(params, x)
    assert (value.dtype, dparams["table"].dtype, dx.dtype) == (jnp.float32, jnp.float32, jnp.bfloat16)
    np.testing.assert_allclose(value, want, rtol=0.01)
    error = np.linalg.norm(dparams["table"] - want_params["table"])
    assert error < 0.02 * np.linalg.norm(want_params["table"])
