"""The chunked state-space form against the recurrence it stands for, one token at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpipe.models.mamba2 import causal_conv, run_numbers, ssd


@jax.jit
def recurrence(x, dt, a, b, c, segments, weight):
    """y and the gradients of sum(y * weight), by h = exp(dt a) h + dt b x^T, y = c h."""

    def run(x, dt, a, b, c):
        def step(carry, token):
            h, before = carry
            x_t, dt_t, b_t, c_t, segment = token
            h = jnp.where((segment == before)[:, None, None, None, None], h, 0)
            h = jnp.exp(dt_t * a)[..., None, None] * h
            h = h + (dt_t[..., None] * b_t[:, :, None])[..., None] * x_t[..., None, :]
            return (h, segment), jnp.einsum("bge,bgrep->bgrp", c_t, h)

        start = jnp.zeros((*x.shape[:1], *x.shape[2:4], b.shape[-1], x.shape[-1]), x.dtype)
        tokens = [jnp.moveaxis(u, 1, 0) for u in (x, dt, b, c, segments)]
        return jnp.moveaxis(lax.scan(step, (start, segments[:, 0]), tokens)[1], 0, 1)

    y, pull = jax.vjp(run, x, dt, a, b, c)
    return y, pull(weight)


def operands(length, seed=0):
    rng = np.random.default_rng(seed)
    x, weight = rng.normal(size=(2, 2, length, 2, 3, 5))
    b, c = rng.normal(size=(2, 2, length, 2, 4))
    dt, a = rng.uniform(0.01, 0.8, (2, length, 2, 3)), -rng.uniform(0.2, 4, (2, 3))
    return x, dt, a, b, c, weight


def documents(length):
    """Row 0 changes often, row 1 has a document that spans several chunks; an id comes back."""
    rows = np.zeros((2, length), np.int32)
    rows[0] = np.arange(length) // 3 % 2
    rows[1, length // 5 :] = 1
    rows[1, 4 * length // 5 :] = 0
    return rows


@pytest.mark.parametrize(
    ("length", "chunk", "packed"),
    [(32, 8, False), (32, 8, True), (29, 8, True), (23, 4, True), (9, 16, True), (1, 8, False)],
)
def test_ssd_is_the_recurrence(length, chunk, packed):
    *inputs, weight = operands(length)
    segments = documents(length) if packed else np.zeros((2, length), np.int32)
    with jax.enable_x64(True):
        want = recurrence(*inputs, segments, weight)

    @jax.jit
    def both(*inputs):
        y, pull = jax.vjp(lambda *u: ssd(*u, run_numbers(segments), chunk), *inputs)
        return y, pull(jnp.asarray(weight, jnp.float32))

    got = both(*(jnp.asarray(u, jnp.float32) for u in inputs))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        np.testing.assert_allclose(x, np.asarray(y), rtol=2e-4, atol=2e-5)


def test_strong_decay_stays_finite():
    # exp(+600) above the diagonal of a chunk would overflow if it were ever made.
    x, dt, a, b, c, weight = (jnp.asarray(u, jnp.float32) for u in operands(16))

    @functools.partial(jax.grad, argnums=(0, 1, 2))
    def gradient(x, dt, a):
        return jnp.vdot(ssd(x, dt, a, b, c, jnp.zeros((2, 16), jnp.int32), 8), weight)

    for g in jax.jit(gradient)(x, 100 * dt, 10 * a):
        assert np.all(np.isfinite(g))


@pytest.mark.parametrize("length", [2, 11])
def test_conv_stays_within_documents(length):
    rng = np.random.default_rng(0)
    x, kernel, bias = rng.normal(size=(2, length, 2, 3)), rng.normal(size=(4, 2, 3)), rng.normal(size=(2, 3))
    segments = np.array([[0] * length, [0] * (length // 2) + [1] * (length - length // 2)], np.int32)
    want = np.zeros_like(x)
    for row in range(2):
        for t in range(length):
            total = bias.copy()
            for w in range(4):
                if t >= w and segments[row, t] == segments[row, t - w]:
                    total += kernel[w] * x[row, t - w]
            want[row, t] = total / (1 + np.exp(-total))
    x, kernel, bias = (jnp.asarray(u, jnp.float32) for u in (x, kernel, bias))
    got = jax.jit(causal_conv)(x, kernel, bias, run_numbers(jnp.asarray(segments)))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_run_numbers():
    segments = jnp.array([[5, 5, 2, 2, 5], [0, 1, 1, 1, 1]])
    np.testing.assert_array_equal(run_numbers(segments), [[0, 0, 1, 1, 2], [0, 1, 1, 1, 1]])
