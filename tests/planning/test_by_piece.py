"""Plans with every piece in a stage of its own."""

import pytest

from jaxpipe.costs.table import CostTable, PieceCost
from jaxpipe.planning.build import staged_plan
from jaxpipe.planning.by_piece import by_piece
from jaxpipe.planning.named import named_plan
from jaxpipe.planning.plan import check
from jaxpipe.planning.schedules import one_f_one_b
from jaxpipe.planning.simulator import simulate

COSTS = CostTable(
    "unit",
    tuple(
        PieceCost(f"p{i}", "k", i + 1, 2, 3, param_bytes=5, stash_bytes=4, grad_stash_bytes=2)
        for i in range(6)
    ),
)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "interleaved_1f1b"])
def test_it_takes_the_same_time_and_memory(name):
    plan = named_plan(name, COSTS, 2, 4)
    apart = by_piece(plan)
    check(apart)
    assert apart.stages == 6
    assert simulate(apart, COSTS).makespan == simulate(plan, COSTS).makespan
    assert simulate(apart, COSTS).peak_bytes <= simulate(plan, COSTS).peak_bytes


def test_pieces_run_forward_in_order_and_backward_in_reverse():
    plan = staged_plan("x", COSTS, 1, range(2), one_f_one_b(2, 1), (0, 2, 6))
    first, second = by_piece(plan).schedule
    assert [str(action) for action in first] == ["0F0", "1F0", "1B0", "0B0"]
    assert [action.stage for action in second] == [2, 3, 4, 5, 5, 4, 3, 2]
