from random import Random

import pytest

from jaxpipe.costs.table import CostTable, Link, PieceCost
from jaxpipe.planning.build import staged_plan
from jaxpipe.planning.plan import Action, Plan
from jaxpipe.planning.schedules import SCHEDULES
from jaxpipe.planning.simulator import simulate
from jaxpipe.program.arrange import arrange
from jaxpipe.program.from_costs import specs_from_costs
from jaxpipe.program.instructions import expand
from jaxpipe.program.program import lower
from jaxpipe.program.verify import verify

EXACT = 10**6
"""More patterns than any program here has ticks, so nobody meets anybody without need."""


def table(pieces=4):
    return CostTable("ms", tuple(PieceCost(f"p{i}", "k", 1, 1, 1, output_bytes=10) for i in range(pieces)))


def one_stage_a_device(costs: CostTable, schedule: str, microbatches: int) -> Plan:
    devices = len(costs.pieces)
    return staged_plan(
        schedule, costs, microbatches, range(devices), SCHEDULES[schedule](devices, microbatches)
    )


def test_the_line_between_pieces():
    pieces = (
        PieceCost("embed", "e", 1, 0, 1, output_bytes=8),
        PieceCost("attention", "core", 1, 2, 0, output_bytes=24),
        PieceCost("head", "h", 0, 2, 2),
    )
    embed, attention, head = specs_from_costs(CostTable("ms", pieces))
    assert (embed.reads, set(embed.phases), embed.has_params) == ({}, set("FBIW"), True)
    assert (set(attention.phases), attention.has_params) == (set("FBI"), False)
    assert (head.writes, set(head.phases)) == ((), set("BIW"))
    assert list(attention.reads.values()) == [0]
    assert list(head.reads.values()) == [1]
    sizes = [[spec.bytes[spec.classes[n]] for n in spec.writes] for spec in (embed, attention)]
    assert sizes == [[8], [24]]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_programs_of_such_pieces_are_verified(schedule):
    costs = table(pieces=3)
    plan, pieces = one_stage_a_device(costs, schedule, 5), specs_from_costs(costs)
    verify(lower(plan, pieces, costs=costs), pieces)


@pytest.mark.parametrize("link", [{}, {"latency": 0.25, "bytes_per_unit": 40.0}])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_with_a_pattern_for_every_tick_never_faster_than_the_dependencies(schedule, link):
    random = Random(schedule)
    pieces = [
        PieceCost(f"p{i}", "k", *(random.uniform(1, 3) for _ in "FIW"), output_bytes=10) for i in range(4)
    ]
    costs = CostTable("ms", tuple(pieces), Link(**link))
    plan = one_stage_a_device(costs, schedule, 6)
    arranged, _ = arrange(plan, specs_from_costs(costs), costs, EXACT)
    # What takes less than the plan does must have left something out.
    assert arranged.makespan >= simulate(plan, costs).makespan * (1 - 1e-9)
    assert sum(len(work) for row in arranged.work for work in row) >= 4 * 6 * 2


def test_equal_lengths_without_messages_take_what_the_formula_says():
    # With F = I = W = 1, m = 8, p = 4. The bubbles are (p - 1)(F + I + W) of GPipe, without the W of the last
    # micro-batch where I hands its gradient on before, and (p - 1)(F + I - W) of ZB-H1.
    costs = table()
    for schedule, bubble in (("gpipe", 9), ("gpipe_split", 6), ("zb_h1", 3)):
        plan = one_stage_a_device(costs, schedule, 8)
        assert arrange(plan, specs_from_costs(costs), costs)[0].makespan == pytest.approx(8 * 3 + bubble)


def test_several_stages_a_device_and_stages_that_float():
    pieces = (
        PieceCost("a", "pre", 1, 1, 1, output_bytes=1),
        PieceCost("b", "attention_core", 3, 6, 0, output_bytes=1),
        PieceCost("c", "post", 1, 1, 1, output_bytes=1),
    )
    costs = CostTable("ms", pieces)
    rows = ("0F0 0F1 1F1 1I1 0I1 0W1 0I0 0W0", "1F0 2F0 2I0 2W0 1I0 2F1 2I1 2W1")
    schedule = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    plan = Plan("helix", 2, 2, ("a", "b", "c"), (0, 1, 2, 3), (0, 1, 1), ("none",) * 3, schedule)
    pieces = specs_from_costs(costs)
    arranged, _ = arrange(plan, pieces, costs, EXACT)
    assert [len(row) for row in expand(plan, pieces)] == [8, 8]
    assert arranged.makespan >= simulate(plan, costs).makespan
