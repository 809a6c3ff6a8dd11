from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.costs.table import CostTable, Link, PieceCost
from jaxpipe.planning.build import make_plan
from jaxpipe.planning.judge_plan import floating_stages
from jaxpipe.planning.named import named_plan
from jaxpipe.planning.plan import check
from jaxpipe.planning.polish import polish
from jaxpipe.planning.schedules import split_backward
from jaxpipe.planning.simulator import simulate
from tests.planning.exact import best_schedule, lower_bound

INFINITE = (np.inf,) * 4


def table(seed, count=4):
    random = Random(seed)
    pieces = (
        PieceCost(
            f"p{i}", "k", *(random.randint(1, 9) for _ in range(3)), 1, random.randint(1, 5), output_bytes=1
        )
        for i in range(count)
    )
    return CostTable("unit", tuple(pieces), Link(random.randint(0, 1)))


def helix_costs():
    pieces = [PieceCost("embed", "embed", 0, 1, 1)]
    for i in range(3):
        pieces += [
            PieceCost(f"{i}/pre", "k", 1 + i, 2, 2, 1, 3, output_bytes=1),
            PieceCost(f"{i}/attention", "attention_core", 3, 6, 0, 0, 2, output_bytes=1),
            PieceCost(f"{i}/post", "k", 2, 1 + i, 2, 1, 4, output_bytes=1),
        ]
    return CostTable("unit", tuple(pieces), Link(0.25))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(["gpipe", "1f1b", "1f1b_split", "zb_h1", "interleaved_1f1b", "zb_v"]),
    st.integers(1, 2),
    st.integers(0, 20_000),
    st.booleans(),
)
def test_no_slower_complete_and_within_the_limits(seed, name, devices, steps, tight):
    """Every action stays on its device; with the memory that the plan holds as the limit it holds no more."""
    costs = table(seed)
    plan = named_plan(name, costs, devices, 2 * devices)
    before = simulate(plan, costs)
    limits = before.peak_bytes if tight else INFINITE[:devices]
    found = polish(plan, costs, limits, steps, seed)
    check(found)
    after = simulate(found, costs)  # raises for a deadlock
    assert lower_bound(plan, costs) <= after.makespan <= before.makespan
    assert [sorted(row) for row in found.schedule] == [sorted(row) for row in plan.schedule]
    assert replace(found, schedule=plan.schedule) == plan
    if tight:
        assert all(new <= old for new, old in zip(after.peak_bytes, before.peak_bytes))


@pytest.mark.parametrize(("name", "devices", "microbatches"), [("1f1b_split", 2, 5), ("zb_h1", 4, 4)])
@pytest.mark.parametrize("seed", range(3))
def test_finds_the_best_order_of_small_plans(name, devices, microbatches, seed):
    """Without a limit and within the memory that the plan holds; chance decides whether at once."""
    costs = table(seed)
    plan = named_plan(name, costs, devices, microbatches)
    before = simulate(plan, costs)
    peaks = [int(peak) for peak in before.peak_bytes]
    assert best_schedule(plan, costs).makespan <= before.makespan
    for limits, finite in ((INFINITE[:devices], None), (peaks, peaks)):
        best = best_schedule(plan, costs, finite).makespan
        found = [
            simulate(polish(plan, costs, limits, 2_000_000, chance), costs).makespan for chance in range(4)
        ]
        assert min(found) == best
        assert max(found) <= 1.03 * best


def test_the_same_for_a_seed():
    costs = table(5)
    plan = make_plan(costs, 4, 8, "1f1b_split")
    found = [polish(plan, costs, INFINITE, 50_000, seed) for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]


def test_no_steps_change_nothing():
    costs = table(5)
    plan = make_plan(costs, 4, 8, "1f1b_split")
    assert polish(plan, costs, INFINITE, 0, 0) == plan


def test_one_device_and_free_work_have_nothing_to_gain():
    for costs in (table(0), CostTable("unit", (PieceCost("a", "k", 0, 0, 0), PieceCost("b", "k", 0, 0, 0)))):
        for devices in (1, 2):
            plan = make_plan(costs, devices, 3, "1f1b_split")
            found = polish(plan, costs, INFINITE[:devices], 10_000, 0)
            assert simulate(found, costs).makespan <= simulate(plan, costs).makespan


@pytest.mark.parametrize("name", ["helix_naive", "helix_two_fold"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("tight", [False, True])
def test_attention_on_several_devices(name, split, tight):
    costs = helix_costs()
    plan = named_plan(name, costs, 2, 4)
    if split:
        plan = replace(plan, schedule=split_backward(plan.schedule))
    before = simulate(plan, costs)
    found = polish(plan, costs, before.peak_bytes if tight else INFINITE[:2], 2_000_000, 0)
    check(found, floating_stages(found, costs))
    after = simulate(found, costs)
    assert after.makespan < before.makespan
    assert [sorted(row) for row in found.schedule] == [sorted(row) for row in plan.schedule]
    if tight:
        assert all(new <= old for new, old in zip(after.peak_bytes, before.peak_bytes))
