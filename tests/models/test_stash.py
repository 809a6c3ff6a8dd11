import itertools
import math
from random import Random

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import Var

from jaxpipe.models.jaxprs import cut, tainted, trace
from jaxpipe.models.stash import CHEAP, fewest_bytes


def size(var) -> int:
    return math.prod(var.aval.shape) * var.aval.dtype.itemsize


def follows(fragment, kept, needed, free) -> bool:
    """Whether all of `needed` follow from `kept` and `free` by cheap equations."""
    known = set(kept) | set(free)
    for eqn in fragment.eqns:
        if eqn.primitive.name in CHEAP["accelerator"] and all(
            v in known for v in eqn.invars if isinstance(v, Var)
        ):
            known.update(eqn.outvars)
    return needed <= known


def random_function(random: Random):
    """A random straight-line program of elementwise functions, casts, reductions and matmuls."""
    unary = [
        jnp.sin,
        jnp.exp,
        lambda v: v.astype(jnp.bfloat16),
        lambda v: v.astype(jnp.float32),
        lambda v: v.sum(-1, keepdims=True),
        lambda v: v[:, :1],
        lambda v: v @ jnp.ones((v.shape[1], random.choice([1, 2, 5])), v.dtype),
    ]
    steps = [(random.choice([*unary, None]), random.random(), random.random()) for _ in range(6)]

    def function(x, w):
        values = [x]
        for f, first, second in steps:
            a, b = (values[int(u * len(values))] for u in (first, second))
            if f is not None:
                values.append(f(a))
            elif a.shape == b.shape or 1 in (a.shape[1], b.shape[1]):
                values.append(a * b)
            else:
                values.append(a * w)
        return values

    return function


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1).map(Random))
def test_fewest_bytes_against_all_subsets(random):
    fragment = trace(random_function(random), jnp.ones((3, 4)), jnp.ones(()))
    x, w = fragment.inputs
    made = [v for e in fragment.eqns for v in e.outvars]
    candidates = tainted(fragment, [x])
    order = [v for v in [x, *made] if v in candidates]
    needed = {v for v in order if random.random() < 0.4}
    free = {v for v in [w, *made] if v not in candidates}
    kept = fewest_bytes(fragment, needed, candidates, CHEAP["accelerator"], [x])
    assert len(set(kept)) == len(kept)
    assert set(kept) <= candidates
    assert follows(fragment, kept, needed, free)
    subsets = itertools.chain.from_iterable(itertools.combinations(order, n) for n in range(len(order) + 1))
    best = min(sum(map(size, s)) for s in subsets if follows(fragment, s, needed, free))
    assert sum(map(size, kept)) == best


def stashed(function, *args, needed):
    """Sizes of what is kept of `function` for values it returns at the indices `needed`."""
    fragment = trace(function, *args)
    wanted = {fragment.outputs[i] for i in needed}
    return fragment, fewest_bytes(
        fragment, wanted, tainted(fragment, fragment.inputs), CHEAP["accelerator"], fragment.inputs
    )


def test_nothing_needed_nothing_kept():
    fragment = trace(lambda x: [jnp.sin(x)], jnp.ones(3))
    assert fewest_bytes(fragment, set(), set(fragment.inputs), CHEAP["cpu"], fragment.inputs) == []


def test_an_input_is_preferred_to_what_follows_from_it():
    fragment, kept = stashed(lambda x: [jnp.sin(jnp.exp(x)), jnp.cos(x)], jnp.ones(8), needed=(0, 1))
    assert kept == [fragment.inputs[0]]


def test_a_small_derived_value_is_preferred_to_a_large_input():
    _, kept = stashed(lambda x: [jnp.sin(x[:2])], jnp.ones(8), needed=(0,))
    assert [v.aval.shape for v in kept] == [(2,)]


def test_a_narrow_copy_is_preferred_to_a_wide_one():
    """Of h in bfloat16 and its float32 copy, the first costs half."""
    x = jnp.ones((4, 8), jnp.bfloat16)
    _, kept = stashed(lambda x: [(x @ x.T).astype(jnp.float32)], x, needed=(0,))
    assert [(v.aval.shape, v.aval.dtype) for v in kept] == [((4, 4), jnp.bfloat16)]


def test_matmuls_are_kept_not_repeated():
    """h = x y is larger than x and y together, yet kept: computing it again is not cheap."""
    x, y = jnp.ones((8, 1)), jnp.ones((1, 8))
    _, kept = stashed(lambda x, y: [jnp.sin(x @ y)], x, y, needed=(0,))
    assert [v.aval.shape for v in kept] == [(8, 8)]


def test_sizes_beyond_32_bits_are_compared_right():
    """Capacities of the flow are 32-bit integers: terabytes are counted in larger units."""
    wide = jax.ShapeDtypeStruct((2**20, 2**20), jnp.float32)

    def function(a):
        h = jnp.cumsum(a, 0)
        return [jnp.sin(h.astype(jnp.bfloat16)), jnp.cos(h[:, : 2**18])]

    fragment = trace(function, wide)
    kept = fewest_bytes(
        fragment,
        set(fragment.outputs),
        tainted(fragment, fragment.inputs),
        CHEAP["accelerator"],
        fragment.inputs,
    )
    # h whole: 4 TiB. Its half-precision copy and a quarter of its columns: 2 TiB + 1 TiB.
    assert sorted(size(v) for v in kept) == [2**40, 2**41]


@pytest.mark.parametrize(
    "activation", [jax.nn.gelu, lambda v: jax.nn.gelu(v, approximate=False), jax.nn.silu]
)
def test_an_activation_keeps_its_input_only(activation):
    """One array, whatever the derivative looks like."""
    h = jnp.ones((4, 16))
    ct = jnp.ones((4, 16))
    fragment = trace(lambda h, ct: [jax.vjp(activation, h)[1](ct)[0]], h, ct)
    backward = tainted(fragment, fragment.inputs[1:])
    eqns = cut(fragment, fragment.inputs, fragment.outputs).eqns
    needed = {v for e in eqns if backward & set(e.outvars) for v in e.invars if isinstance(v, Var)} - backward
    own = tainted(fragment, fragment.inputs[:1])
    inputs = fragment.inputs[:1]
    assert fewest_bytes(fragment, needed & own, own - backward, CHEAP["accelerator"], inputs) == [inputs[0]]


def test_a_cpu_keeps_an_exponential():
    """exp(x) and x cost the same bytes; where exponentials are dear, what follows from exp(x) is kept."""
    fragment = trace(lambda x: [jnp.exp(x) * 2], jnp.ones(8))
    candidates = tainted(fragment, fragment.inputs)
    kept = {
        place: fewest_bytes(
            fragment, set(fragment.outputs), candidates, cheap, fragment.inputs, set(fragment.inputs)
        )
        for place, cheap in CHEAP.items()
    }
    assert kept["accelerator"] == [fragment.inputs[0]]
    assert kept["cpu"] == [fragment.eqns[0].outvars[0]]
