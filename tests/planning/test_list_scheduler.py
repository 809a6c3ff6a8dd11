from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.costs.table import CostTable, Link, PieceCost
from jaxpipe.planning.build import make_plan
from jaxpipe.planning.candidate import PLAIN
from jaxpipe.planning.list_scheduler import (
    ORDERS,
    Lines,
    Setting,
    least_memory,
    list_schedule,
    to_schedule,
)
from jaxpipe.planning.plan import check
from jaxpipe.planning.simulator import simulate
from jaxpipe.planning.stages import stage_costs
from tests.planning.exact import blank_plan

SETTINGS = st.builds(
    Setting,
    forward=st.sampled_from([0.5, 1.0, 2.5, np.inf]),
    backward=st.sampled_from([0.5, 1.0, 3.0]),
    order=st.sampled_from(ORDERS),
    reserve=st.booleans(),
    patience=st.sampled_from([0.0, 0.5, 1.0]),
    catch_up=st.booleans(),
    defer=st.sampled_from([0.0, 0.5, 1.0]),
)


def lines_of(plan, costs):
    """What the scheduler is told of the stages of a plan."""
    stages, homes = stage_costs(plan, costs), np.array(plan.stage_to_device)
    held, kept, made = (
        np.array([getattr(stage, name) for stage in stages], float)
        for name in ("stash_bytes", "grad_stash_bytes", "made_bytes")
    )
    messages = np.array([costs.link.time(stage.output_bytes) for stage in stages])
    messages[:-1][homes[1:] == homes[:-1]] = 0
    times = np.array([(stage.F, stage.I, stage.W) for stage in stages], float)
    return Lines(times, np.stack([held, kept - held, -kept], axis=1), made, messages, homes)


@st.composite
def problems(draw):
    """A table of one piece a stage without parameters, and a plan of these stages without a schedule."""
    devices = draw(st.integers(1, 4))
    more = draw(st.lists(st.integers(0, devices - 1), max_size=5))
    homes = draw(st.permutations([*range(devices), *more]))
    numbers, tenths = st.integers(0, 9), st.integers(0, 9).map(lambda n: n / 10)
    pieces = []
    for i in range(len(homes)):
        sizes = {
            "stash_bytes": draw(numbers),
            "grad_stash_bytes": draw(numbers),
            "output_bytes": draw(numbers),
        }
        pieces.append(PieceCost(f"p{i}", "k", *(draw(tenths) for _ in range(3)), **sizes))
    costs = CostTable("unit", tuple(pieces), Link(draw(st.sampled_from([0, 0.3, 20])), 10))
    return costs, blank_plan(costs, range(len(homes) + 1), homes, draw(st.integers(1, 7)))


@settings(max_examples=300, deadline=None)
@given(problems(), SETTINGS, st.lists(st.integers(0, 5), min_size=4, max_size=4), st.booleans())
def test_complete_and_within_any_limit(problem, setting, more, unlimited):
    costs, plan = problem
    lines = lines_of(plan, costs)
    limits = np.full(plan.devices, np.inf)
    if not unlimited:
        limits = np.array(more[: plan.devices], float)
        least = np.zeros(plan.devices)
        np.maximum.at(least, lines.device_S, least_memory(lines))
        limits += least
    rows = list_schedule(lines, limits, plan.microbatches, setting)
    plan = replace(plan, schedule=to_schedule(rows, plan.microbatches))
    check(plan)
    simulation = simulate(plan, costs)
    assert simulation.makespan <= rows.end_D.max() * (1 + 1e-9)
    for peak, limit in zip(simulation.peak_bytes, limits):
        assert peak <= limit * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(problems(), SETTINGS, st.data())
def test_no_schedule_below_the_least_memory(problem, setting, data):
    costs, plan = problem
    lines = lines_of(plan, costs)
    least = np.zeros(plan.devices)
    np.maximum.at(least, lines.device_S, least_memory(lines))
    device = data.draw(st.integers(0, plan.devices - 1))
    least[device] -= 0.5
    assert list_schedule(lines, least, plan.microbatches, setting).end_D.max() == np.inf


def test_least_memory_by_hand():
    """Both stages of device 0 stash, and the I of the one that makes most for W comes beside them."""
    pieces = (
        PieceCost("a", "k", 1, 1, 1, stash_bytes=3, grad_stash_bytes=5),
        PieceCost("b", "k", 1, 1, 1, stash_bytes=7, grad_stash_bytes=2),
        PieceCost("c", "k", 1, 1, 1, stash_bytes=1, grad_stash_bytes=2),
    )
    costs = CostTable("unit", pieces)
    lines = lines_of(blank_plan(costs, range(4), (0, 1, 0), 2), costs)
    assert least_memory(lines)[0] == 3 + 1 + 2
    assert least_memory(lines)[1] == 7


def test_gives_up_at_the_deadline():
    costs = CostTable("unit", (PieceCost("a", "k", 1, 2, 3), PieceCost("b", "k", 1, 2, 3)))
    lines = lines_of(blank_plan(costs, range(3), (0, 1), 4), costs)
    room = np.full(2, np.inf)
    makespan = list_schedule(lines, room, 4, PLAIN).end_D.max()
    assert list_schedule(lines, room, 4, PLAIN, makespan).end_D.max() == makespan
    assert list_schedule(lines, room, 4, PLAIN, makespan / 2).end_D.max() == np.inf


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("times", [(1, 2), (3, 5), (0.1, 0.3), (0.7, 1.1)])
def test_plain_is_1f1b_where_stages_are_equal(devices, times):
    """The same makespan, and no more micro-batches in flight: with room for those of 1F1B it is the same."""
    forward, backward = times
    pieces = (PieceCost(f"p{i}", "k", forward, backward, 0, stash_bytes=1) for i in range(devices))
    costs = CostTable("unit", tuple(pieces))
    for microbatches in (1, devices, 3 * devices + 1):
        usual = make_plan(costs, devices, microbatches, "1f1b")
        expected = simulate(usual, costs)
        lines = lines_of(usual, costs)
        for room in (np.full(devices, np.inf), np.array(expected.peak_bytes)):
            rows = list_schedule(lines, room, microbatches, PLAIN)
            plan = replace(usual, schedule=to_schedule(rows, microbatches))
            check(plan)
            found = simulate(plan, costs)
            assert found.makespan == pytest.approx(expected.makespan)
            assert found.peak_bytes == expected.peak_bytes
