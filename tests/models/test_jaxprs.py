import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.models.jaxprs import cut, tainted, trace, used, without_checkpoints

X = jnp.arange(6.0).reshape(2, 3) / 7


def primitives(fragment) -> list[str]:
    return [e.primitive.name for e in fragment.eqns]


@jax.custom_vjp
def double(x):
    return 2 * x


double.defvjp(lambda x: (2 * x, None), lambda _, ct: (2 * ct,))


@jax.jit
def nested(x, y):
    inner = jax.jit(lambda a: jnp.where(a > 0.3, a, -a) @ y)
    return jax.nn.silu(inner(x)) + jax.checkpoint(double)(jax.nn.relu(x) @ y)


def loop(x, y):
    carry, out = jax.lax.scan(lambda c, row: (jnp.tanh(c * row.sum()), c @ y), x, jnp.ones((4, 3)))
    return jax.lax.cond(x.sum() > 0, lambda: carry @ y, lambda: carry @ y + 1) + out.sum(0)


@pytest.mark.parametrize("function", [nested, loop])
def test_tracing_keeps_values(function):
    y = jnp.arange(9.0).reshape(3, 3) - 4
    fragment = trace(lambda x, y: [function(x, y), x], X, y)
    for x in (X, -X, X - 0.4):
        found, same = fragment(x, y)
        np.testing.assert_allclose(found, function(x, y), rtol=1e-6)
        np.testing.assert_array_equal(same, x)


def test_tracing_inlines_calls_but_not_loops():
    y = jnp.ones((3, 3))
    inlined = primitives(trace(lambda x, y: [nested(x, y)], X, y))
    assert not {"jit", "closed_call", "remat2", "custom_jvp_call", "custom_vjp_call"} & set(inlined)
    assert inlined.count("dot_general") == 2
    kept = primitives(trace(lambda x, y: [loop(x, y)], X, y))
    assert kept.count("scan") == 1
    assert kept.count("cond") == 1


@jax.custom_jvp
def step(x):
    return jnp.where(x > 0, 1.0, 0.0)


step.defjvp(lambda primals, tangents: (step(*primals), 5 * tangents[0]))


def test_undone_checkpoints_leave_derivatives_as_they_were_defined():
    function = jax.jit(lambda x: [jax.checkpoint(lambda a: (double(a) * step(a)).sum())(x)])
    undone = without_checkpoints(jax.make_jaxpr(function)(X))
    kept = [e.primitive.name for e in jax.make_jaxpr(undone)(X).eqns]
    assert "custom_vjp_call" in kept
    assert "custom_jvp_call" in kept
    assert not {"jit", "remat2"} & set(kept)
    # d(2x step(x)) = 2 step(x) + 2x * 5 by the rules above; without them the second part would be 0.
    found = jax.grad(lambda x: undone(x)[0])(X)
    np.testing.assert_allclose(found, 2 * (X > 0) + 10 * X, rtol=1e-6)


def test_inlining_shows_that_a_value_passes_through():
    fragment = trace(lambda x: [jax.jit(lambda a: a)(x), jax.jit(lambda a: 1.0)(x)], X)
    assert fragment.eqns == ()
    assert fragment.outputs[0] is fragment.inputs[0]
    assert [float(v) for v in fragment(X)[1:]] == [1.0]


def test_constants_belong_to_the_fragment():
    table = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    fragment = trace(lambda x: [x * table, x], X)
    part = cut(fragment, fragment.inputs, fragment.outputs[:1])
    np.testing.assert_allclose(part(X)[0], X * table)


# a, b -> p = a * b -> q = sin p -> r = q + a;  s = cos b
DIAMOND = trace(lambda a, b: [a * b, jnp.sin(a * b) + a, jnp.cos(b)], 2.0, 3.0)


def test_cut_takes_only_what_leads_to_the_outputs():
    a, b = DIAMOND.inputs
    p, r, s = DIAMOND.outputs
    assert primitives(cut(DIAMOND, (a, b), (s,))) == ["cos"]
    assert primitives(cut(DIAMOND, (a, b), (r,))).count("cos") == 0
    assert primitives(cut(DIAMOND, (a,), (a,))) == []
    np.testing.assert_allclose(cut(DIAMOND, (a, b), (s, p))(2.0, 3.0), [np.cos(3.0), 6.0], rtol=1e-6)


def test_cut_may_start_in_the_middle():
    a = DIAMOND.inputs[0]
    q = next(e for e in DIAMOND.eqns if e.primitive.name == "sin").outvars[0]
    part = cut(DIAMOND, (q, a), DIAMOND.outputs[1:2])
    assert primitives(part) == ["add"]
    assert float(part(10.0, 0.5)[0]) == 10.5


def test_cut_refuses_outputs_that_its_inputs_do_not_determine():
    a, b = DIAMOND.inputs
    with pytest.raises(ValueError, match="outputs need 1 inputs that were not given"):
        cut(DIAMOND, (a,), DIAMOND.outputs[:1])
    with pytest.raises(ValueError, match="outputs need 1 inputs"):
        cut(DIAMOND, (b,), (a,))


def test_tainted_follows_dependence():
    a, b = DIAMOND.inputs
    p, r, s = DIAMOND.outputs
    assert tainted(DIAMOND, [a]) >= {a, p, r}
    assert not tainted(DIAMOND, [a]) & {b, s}
    assert tainted(DIAMOND, [b]) >= {b, p, r, s}
    assert tainted(DIAMOND, [s]) == {s}
    assert tainted(DIAMOND, []) == set()


def test_used_counts_what_is_read_or_given_out():
    a, b = DIAMOND.inputs
    s = DIAMOND.outputs[2]
    assert used(cut(DIAMOND, (a, b), (s,))) == {b, s}
    assert used(cut(DIAMOND, (a, b), (a,))) == {a}
    assert used(trace(lambda x: [1.0], X)) == set()
