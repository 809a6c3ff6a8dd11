"""Slots and patterns chosen by the numbers."""

import pytest

from jaxpipe.program import choose
from jaxpipe.program.arrange import arrange
from jaxpipe.program.choose import GAIN, lower_by_numbers
from jaxpipe.program.verify import verify
from tests.program.test_arrange import chain, costs_of
from tests.program.toys import named_plan

SPECS = chain(14)
COSTS = costs_of(SPECS, [(1, 1, 1)] * 16)
PLAN = named_plan(SPECS, "1f1b", 8, 16)


def lowered(monkeypatch, limit, **options):
    monkeypatch.setattr(choose, "OPS", limit)
    program, makespan = lower_by_numbers(PLAN, SPECS, COSTS, **options)
    verify(program, SPECS)
    patterns = len(program.signature.patterns)
    assert makespan == arrange(PLAN, SPECS, COSTS, patterns)[0].makespan
    return program


def is_stacked(program):
    return {op.slot is None for op in program.signature.ops if op.kind == "block"} == {True}


def test_slots_are_static_until_that_makes_too_many_ops(monkeypatch):
    program = lowered(monkeypatch, 256)
    count = len(program.signature.ops)
    assert not is_stacked(program)
    assert not is_stacked(lowered(monkeypatch, count))
    stacked = lowered(monkeypatch, count - 1)
    assert is_stacked(stacked)
    assert len(stacked.signature.ops) < count


def test_the_fewest_patterns_near_the_best_time_are_taken(monkeypatch):
    times = {count: arrange(PLAN, SPECS, COSTS, count)[0].makespan for count in (1, 2, 4, 8)}
    assert times[8] < times[1] * (1 - GAIN)  # fused B on the full pattern wastes time
    expected = min(count for count in times if times[count] <= (1 + GAIN) * min(times.values()))
    assert 1 < len(lowered(monkeypatch, 256).signature.patterns) <= expected


def test_patterns_stop_where_the_ops_do(monkeypatch):
    count = len(lowered(monkeypatch, 256).signature.ops)
    assert len(lowered(monkeypatch, 2 * count - 1).signature.patterns) == 1
    assert len(lowered(monkeypatch, 8 * count).signature.patterns) > 1


@pytest.mark.parametrize(("slots", "patterns"), [("static", 1), ("stacked", 3)])
def test_what_is_asked_for_is_done(monkeypatch, slots, patterns):
    program = lowered(monkeypatch, 1, slots=slots, patterns=patterns)
    assert is_stacked(program) == (slots == "stacked")
    assert len(program.signature.patterns) == patterns
