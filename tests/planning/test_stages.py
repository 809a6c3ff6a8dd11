import pytest

from jaxpipe.costs.table import CostTable, PieceCost
from jaxpipe.planning.plan import Plan
from jaxpipe.planning.stages import piece_time, stage_costs

PIECES = (
    PieceCost("a", "x", 1, 2, 4, param_bytes=10, stash_bytes=100, grad_stash_bytes=7, output_bytes=30),
    PieceCost("b", "x", 8, 16, 32, param_bytes=20, stash_bytes=200, grad_stash_bytes=211, output_bytes=40),
    PieceCost("c", "y", 64, 128, 256, param_bytes=40, stash_bytes=400, grad_stash_bytes=413, output_bytes=50),
)
COSTS = CostTable("unit", PIECES, state_factor=2.5)


def plan(*recompute):
    return Plan("p", 2, 1, ("a", "b", "c"), (0, 2, 3), (0, 1), recompute, ((), ()))


def test_sums_over_pieces():
    first, second = stage_costs(plan("none", "none", "none"), COSTS)
    # I of a frees 93 of its 100 bytes; I of b makes 11, which the sums 300 and 218 do not tell.
    assert first == (9, 18, 36, 54, 40, 75, 300, 218, 11)
    assert second == (64, 128, 256, 384, 50, 100, 400, 413, 13)


def test_recompute_runs_the_forward_again_and_keeps_inputs_only():
    first, second = stage_costs(plan("full", "full", "full"), COSTS)
    # a reads the batch and stashes nothing; b stashes the output of a; c that of b. What they leave to W is
    # the same, but I makes all of it that is not the input.
    assert first == (9, 18 + 9, 36, 54 + 9, 40, 75, 0 + 30, 218, 7 + 181)
    assert second == (64, 128 + 64, 256, 384 + 64, 50, 100, 40, 413, 373)
    assert [piece_time(PIECES[1], policy) for policy in ("none", "full")] == [56, 64]


def test_a_table_of_other_pieces_is_refused():
    other = CostTable("unit", PIECES[:1] + PIECES[2:])
    with pytest.raises(ValueError, match="piece 1 is 'c' in the table and 'b' in the plan"):
        stage_costs(plan("none", "none", "none"), other)
    with pytest.raises(ValueError, match="2 pieces in the table, 3 in the plan"):
        stage_costs(plan("none", "none", "none"), CostTable("unit", PIECES[:2]))
