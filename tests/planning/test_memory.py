import pytest

from jaxpipe.costs.table import CostTable, PieceCost
from jaxpipe.planning.build import make_plan
from jaxpipe.planning.interchange import read_csv
from jaxpipe.planning.plan import Plan
from jaxpipe.planning.simulator import simulate


def one_stage(row, **sizes):
    costs = CostTable("unit", (PieceCost("a", "k", 1, 1, 1, **sizes),), state_factor=4)
    schedule = read_csv(row.replace(" ", ","))
    return simulate(Plan("p", 1, 2, ("a",), (0, 1), (0,), ("none",), schedule), costs)


def test_stash_lives_from_the_start_of_F_to_the_end_of_B():
    simulation = one_stage("0F0 0F1 0B0 0B1", param_bytes=100, stash_bytes=10, grad_stash_bytes=3)
    assert simulation.memory == (((0, 400), (0, 410), (1, 420), (4, 410), (6, 400)),)
    assert simulation.peak_bytes == (420,)


def test_apart_I_leaves_more_for_W():
    simulation = one_stage("0F0 0I0 0F1 0W0 0I1 0W1", stash_bytes=10, grad_stash_bytes=3)
    assert simulation.memory == (((0, 0), (0, 10), (1, 13), (2, 23), (4, 10), (4, 13), (6, 0)),)
    assert simulation.peak_bytes == (23,)


def test_a_stash_is_free_before_the_next_action_begins():
    assert one_stage("0F0 0B0 0F1 0B1", stash_bytes=10).peak_bytes == (10,)


@pytest.mark.parametrize(("schedule", "held"), [("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1])])
def test_pipeline_memory_is_state_plus_stash_in_flight(schedule, held):
    sizes = {"param_bytes": 1000, "stash_bytes": 10, "output_bytes": 1}
    costs = CostTable(
        "unit", tuple(PieceCost(f"p{i}", "k", 1, 1, 1, **sizes) for i in range(8)), state_factor=2
    )
    peaks = simulate(make_plan(costs, 4, 8, schedule), costs).peak_bytes
    assert peaks == tuple(2 * 2000 + 20 * count for count in held)
    # With recompute each piece keeps only its input; the first piece has none.
    peaks = simulate(make_plan(costs, 4, 8, schedule, recompute="full"), costs).peak_bytes
    assert peaks == tuple(4000 + (1 if device == 0 else 2) * n for device, n in enumerate(held))
