import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpipe.training.config import Config, OptimizerConfig, TrainConfig
from jaxpipe.training.optimizer import (
    clip_by_norm,
    decay_mask,
    get_moments,
    learning_rate,
    make_optimizer,
    set_moments,
)


def config(steps=100, **settings) -> Config:
    return Config(
        family="none", model=None, optimizer=OptimizerConfig(**settings), train=TrainConfig(steps=steps)
    )


def test_learning_rate_rises_linearly_and_falls_along_a_cosine():
    c = config(steps=110, learning_rate=0.2, warmup_steps=10, final_fraction=0.1)
    rates = [float(learning_rate(c, step)) for step in range(120)]
    np.testing.assert_allclose(rates[:10], [0.02 * (step + 1) for step in range(10)], rtol=1e-6)
    cosine = [0.02 + 0.18 * (1 + math.cos(math.pi * i / 100)) / 2 for i in range(100)]
    np.testing.assert_allclose(rates[10:110], cosine, rtol=1e-5)
    np.testing.assert_allclose(rates[110:], 0.02, rtol=1e-6)


@pytest.mark.parametrize("warmup", [0, 7])
def test_learning_rate_agrees_with_optax(warmup):
    """Optax starts its warm-up at `init_value`: one step's worth makes the two the same."""
    c = config(steps=40, learning_rate=0.3, warmup_steps=warmup, final_fraction=0.25)
    peak = 0.3
    tail = optax.cosine_decay_schedule(peak, 40 - warmup, alpha=0.25)
    expected = [peak * (step + 1) / warmup if step < warmup else tail(step - warmup) for step in range(40)]
    found = jax.vmap(lambda step: learning_rate(c, step))(jnp.arange(40))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_warm_up_as_long_as_the_run():
    c = config(steps=5, learning_rate=1.0, warmup_steps=5)
    assert float(learning_rate(c, 4)) == 1.0
    assert math.isfinite(float(learning_rate(c, 5)))


PARAMS = {
    "mlp": {"kernel": jnp.arange(6.0).reshape(2, 3), "scale": jnp.ones(3)},
    "attention": {},
}


def adamw_by_hand(param, grads, c, decays):
    """Algorithm 2 of arXiv 1711.05101 with the learning rate inside the decay, in float64."""
    s, param = c.optimizer, np.float64(param)
    m, v = np.zeros_like(param), np.zeros_like(param)
    for t, grad in enumerate(grads, 1):
        m = s.b1 * m + (1 - s.b1) * grad
        v = s.b2 * v + (1 - s.b2) * grad**2
        update = (m / (1 - s.b1**t)) / (np.sqrt(v / (1 - s.b2**t)) + s.eps)
        param = param - float(learning_rate(c, t - 1)) * (update + decays * s.weight_decay * param)
    return param, m, v


def run(optimizer, params, state, grads):
    for grad in grads:
        updates, state = optimizer.update(grad, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def random_grads(count):
    keys = jax.random.split(jax.random.key(0), count)
    return [jax.tree.map(lambda p, k=key: jax.random.normal(k, p.shape), PARAMS) for key in keys]


def test_updates_equal_adamw_by_hand_and_only_matrices_decay():
    c = config(learning_rate=0.05, warmup_steps=2, weight_decay=0.3, b1=0.8, b2=0.9)
    assert decay_mask(PARAMS) == {"mlp": {"kernel": True, "scale": False}, "attention": {}}
    optimizer = make_optimizer(c, decay_mask(PARAMS))
    grads = random_grads(5)
    params, state = run(optimizer, PARAMS, optimizer.init(PARAMS), grads)
    mu, nu = get_moments(state)
    for name, decays in (("kernel", True), ("scale", False)):
        history = [np.float64(grad["mlp"][name]) for grad in grads]
        param, m, v = adamw_by_hand(PARAMS["mlp"][name], history, c, decays)
        np.testing.assert_allclose(params["mlp"][name], param, rtol=1e-5)
        np.testing.assert_allclose(mu["mlp"][name], m, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(nu["mlp"][name], v, rtol=1e-4, atol=1e-6)


def test_the_mask_holds_for_parameters_with_a_stage_axis():
    """A scale stacked over stages is a matrix by its shape, and must not decay all the same."""
    c = config(warmup_steps=0, weight_decay=0.5)
    stacked = jax.tree.map(lambda p: jnp.stack([p, p]), PARAMS)
    optimizer = make_optimizer(c, decay_mask(PARAMS))
    params, _ = run(optimizer, stacked, optimizer.init(stacked), [jax.tree.map(jnp.zeros_like, stacked)])
    np.testing.assert_array_equal(params["mlp"]["scale"], stacked["mlp"]["scale"])
    np.testing.assert_allclose(params["mlp"]["kernel"], stacked["mlp"]["kernel"] * (1 - 5e-4), rtol=1e-6)


def test_moments_and_step_are_all_there_is_to_resume():
    c = config(warmup_steps=3)
    optimizer, grads = make_optimizer(c, decay_mask(PARAMS)), random_grads(6)
    straight, _ = run(optimizer, PARAMS, optimizer.init(PARAMS), grads)
    half, state = run(optimizer, PARAMS, optimizer.init(PARAMS), grads[:4])
    fresh = set_moments(optimizer.init(PARAMS), *get_moments(state), step=4)
    assert jax.tree.structure(fresh) == jax.tree.structure(state)
    resumed, _ = run(optimizer, half, fresh, grads[4:])
    jax.tree.map(np.testing.assert_array_equal, resumed, straight)


@pytest.mark.parametrize(("clip", "scale"), [(1.0, 0.2), (5.0, 1.0), (80.0, 1.0)])
def test_clip_by_norm(clip, scale):
    grads = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]], jnp.bfloat16)}
    clipped = clip_by_norm(grads, optax.global_norm(grads), clip)
    np.testing.assert_allclose(clipped["a"], [3 * scale, 0], rtol=1e-6)
    np.testing.assert_allclose(np.float32(clipped["b"]), [[4 * scale]], rtol=1e-2)
    assert clipped["b"].dtype == jnp.bfloat16


def test_clip_by_norm_of_zero_gradients():
    zeros = {"a": jnp.zeros(3)}
    np.testing.assert_array_equal(clip_by_norm(zeros, jnp.float32(0), 1.0)["a"], zeros["a"])
