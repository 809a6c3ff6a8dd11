from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.program.instructions import expand
from jaxpipe.program.patterns import (
    assign,
    commonest,
    full_pattern,
    merged,
    sent_by_tick,
    to_pattern,
    to_senders,
)
from jaxpipe.program.ticks import Channel, place
from tests.program.toys import named_plan, toy_specs

RIGHT, LEFT = Channel("wide", 1), Channel("wide", -1)
A, B, C = (frozenset({(0, d)}) for d in range(3))


def test_full_pattern_leaves_out_devices_without_a_neighbour():
    assert full_pattern((LEFT, RIGHT, Channel("narrow", 3)), 4) == ((1, 2, 3), (0, 1, 2), (0,))


def test_patterns_and_their_senders():
    pattern = ((1, 2), (), (0,))
    assert to_senders(pattern) == {(0, 1), (0, 2), (2, 0)}
    assert to_pattern(to_senders(pattern), 3) == pattern


def test_what_1f1b_sends_by_hand():
    """0F0 0F1 0B0 0B1 and 1F0 1B0 1F1 1B1 on ticks 0 1 5 7 and 2 3 4 5."""
    specs = toy_specs(("embed", "block", "block", "head"), ["residuals"] * 4)
    plan = named_plan(specs, "1f1b", 2, 2)
    sent = sent_by_tick(place(plan, expand(plan, specs), specs), (LEFT, RIGHT))
    right, left, none = {(1, 0)}, {(0, 1)}, set()
    assert sent == [none, right, right, none, left, none, left, none]


def test_each_tick_takes_the_smallest_pattern_that_holds_what_it_sends():
    patterns = [A | B | C, A | B, C]
    assert assign([A, A | C, frozenset(), C], patterns) == [1, 0, 2, 2]


def test_the_commonest_stay_and_one_holds_the_others():
    sent = [A] * 5 + [B] * 4 + [C] * 3 + [B | C]
    assert commonest(sent, 2) == [A, B | C]
    assert commonest(sent, 3) == [A, B, B | C]
    assert commonest(sent, 4) == [A, B, C, B | C]
    assert commonest(sent, 1) == [A | B | C]


def test_the_rarest_are_merged_and_the_clock_decides_between_equals():
    sent = [A] * 5 + [B] * 5 + [C]
    assert set(merged(sent, 2, lambda patterns: float(A | C in patterns))) == {A, B | C}
    assert set(merged(sent, 2, lambda patterns: float(B | C in patterns))) == {B, A | C}
    assert set(merged(sent, 1, lambda patterns: 0.0)) == {A | B | C}
    assert set(merged(sent, 3, lambda patterns: 0.0)) == {A, B, C}


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1).map(Random))
def test_patterns_hold_what_every_tick_sends(random):
    pairs = [(c, d) for c in range(2) for d in range(3)]
    sent = [frozenset(random.sample(pairs, random.randint(0, 4))) for _ in range(random.randint(1, 20))]
    count = random.randint(1, 6)
    for patterns in (merged(sent, count, lambda tried: random.random()), commonest(sent, count)):
        assert len(set(patterns)) == len(patterns) <= count
        assert frozenset().union(*patterns) == frozenset().union(*sent)
        for need, number in zip(sent, assign(sent, patterns), strict=True):
            assert need <= patterns[number]
