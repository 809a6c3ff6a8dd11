"""The published problems, against figures that are known of them."""

from dataclasses import replace
from statistics import mean

import pytest

from experiments.benchmarks.published_cells import bounds, cell_costs, cells, measured_gain
from jaxpipe.costs.table import CostTable, PieceCost
from jaxpipe.planning.named import named_plan
from jaxpipe.planning.simulator import simulate


@pytest.fixture(scope="module")
def gains():
    """Of every cell what could be gained at most over S-1F1B: with a whole head, so with fill, and split."""
    found = []
    for cell in cells():
        costs = cell_costs(cell)
        usual = simulate(named_plan("s_1f1b", costs, cell.devices, cell.microbatches), costs).makespan
        found.append([usual / bound for bound in bounds(costs, cell.devices, cell.microbatches)])
    return found


def test_there_are_18_with_the_bounds_that_are_known(gains):
    assert len(set(cells())) == len(gains) == 18
    assert mean(whole for whole, *_ in gains) == pytest.approx(1.663, abs=5e-4)
    assert mean(split for *_, split in gains) == pytest.approx(1.747, abs=5e-4)
    assert all(split >= whole >= filled > 1 for whole, filled, split in gains)


def test_published_gains_are_read_from_the_right_cells():
    found = {str(cell): measured_gain(cell) for cell in cells()}
    assert found["Gemma Small 2k"] == 5086 / 4421
    assert found["Nemotron-H Large 4k"] == 2650 / 1946


def test_a_cell_by_hand():
    """Nemotron-H Medium: 56 layers, every sixth is attention, then the head.

    All work takes 1169 on each of 8 devices; the head takes 988 and 201 more to fill and drain its device.
    """
    cell = next(cell for cell in cells() if str(cell) == "Nemotron-H Medium 4k")
    costs = cell_costs(cell)
    assert [i for i, piece in enumerate(costs.pieces) if piece.F == 3.22] == list(range(6, 57, 6))
    assert (len(costs.pieces), cell.devices, cell.microbatches) == (58, 8, 32)
    total = 9 * (3.22 + 5.07 + 0.54) + 47 * (1.0 + 2.85 + 0.02) + 23.94 + 5.24 + 1.71
    down, up = 9 * 3.22 + 47 * 1.0, 9 * 5.07 + 47 * 2.85
    filled = down + 32 * (23.94 + 5.24) + up
    assert bounds(costs, 8, 32) == pytest.approx((4 * total, filled, 4 * total))


def test_bounds_where_the_head_is_the_bottleneck():
    """Two layers of 3, 4, 1 and a head of 5, 2, 10, or 7, 2, 2, on two devices, three micro-batches.

    The head waits 6 for its first F; what comes behind its last I is its W or, if that is short, 8 of I.
    """
    pieces = [PieceCost(f"l{i}", "k", 3, 4, 1) for i in range(2)] + [PieceCost("head", "head", 5, 2, 10)]
    costs = CostTable("unit", tuple(pieces))
    assert bounds(costs, 2, 3) == (3 * 17, 6 + 3 * 7 + 3 * 10, 3 * 33 / 2)
    short = replace(costs, pieces=(*pieces[:2], replace(pieces[2], F=7, W=2)))
    assert bounds(short, 2, 3) == (3 * 27 / 2, 6 + 3 * 9 + 8, 3 * 27 / 2)
