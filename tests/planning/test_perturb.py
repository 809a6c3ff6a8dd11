import numpy as np
import pytest

from jaxpipe.costs.table import CostTable, Link, PieceCost
from jaxpipe.planning.build import staged_plan
from jaxpipe.planning.head_split import split_vocabulary
from jaxpipe.planning.named import named_plan
from jaxpipe.planning.perturb import LEAST, perturbed, spreads
from jaxpipe.planning.schedules import one_f_one_b
from jaxpipe.planning.simulator import simulate

LAYERS = tuple(PieceCost(f"layer_{i}/mlp", "mlp", 1.0, 2.0, 0.5, output_bytes=1) for i in range(5))
COSTS = CostTable("unit", (*LAYERS, PieceCost("head", "head", 3.0, 1.0, 2.0)), Link(0.25))
NAMES = ("s_1f1b", "zb1p", "interleaved_1f1b")


def plans(costs=COSTS):
    return {name: (named_plan(name, costs, 2, 4), costs) for name in NAMES}


def test_no_spread_changes_nothing():
    assert perturbed(COSTS, 0.0, np.random.default_rng(0)) == COSTS
    for name, found in spreads(plans(), 0.0, 3, 0).items():
        assert found == pytest.approx([simulate(*plans()[name]).makespan] * 3)


def test_factors_are_drawn_for_every_phase_of_every_piece():
    """With times of 1 the times are the factors: their mean is 1 and their deviation the spread."""
    pieces = tuple(PieceCost(f"p{i}", "k", 1.0, 1.0, 1.0, stash_bytes=7) for i in range(2000))
    found = perturbed(CostTable("unit", pieces), 0.05, np.random.default_rng(1))
    times = np.array([(piece.F, piece.I, piece.W) for piece in found.pieces])
    assert len(np.unique(times)) == times.size
    assert times.mean(0) == pytest.approx([1.0] * 3, abs=0.005)
    assert times.std(0) == pytest.approx([0.05] * 3, abs=0.005)
    assert np.abs(np.corrcoef(times.T) - np.eye(3)).max() < 0.1
    assert {piece.stash_bytes for piece in found.pieces} == {7}
    wide = perturbed(CostTable("unit", pieces), 5.0, np.random.default_rng(1))
    assert min(piece.F for piece in wide.pieces) == LEAST


@pytest.mark.parametrize("costs", [COSTS, split_vocabulary(COSTS, 2)])
def test_spreads_are_simulations_of_perturbed_costs_with_the_same_draws(costs):
    found = spreads(plans(costs), 0.2, 4, 5)
    rng = np.random.default_rng(5)
    for draw in range(4):
        table = perturbed(costs, 0.2, rng)
        for name, (plan, _) in plans(costs).items():
            assert found[name][draw] == pytest.approx(simulate(plan, table).makespan)
    assert len(set(found["s_1f1b"])) == 4


def test_what_is_recomputed_takes_its_own_factor_twice():
    policies = ("full", "none") * 3
    plan = staged_plan("again", COSTS, 4, range(2), one_f_one_b(2, 4), recompute=policies)
    found = spreads({"again": (plan, COSTS)}, 0.1, 1, 2)["again"]
    table = perturbed(COSTS, 0.1, np.random.default_rng(2))
    assert found == pytest.approx([simulate(plan, table).makespan])


def test_shards_take_the_factor_of_their_piece():
    """On one device a whole head and its shards take the same time in every draw."""
    split = split_vocabulary(COSTS, 4)
    both = {str(n): (named_plan("s_1f1b", costs, 1, 3), costs) for n, costs in enumerate((COSTS, split))}
    whole, shards = spreads(both, 0.3, 5, 0).values()
    assert shards == pytest.approx(whole)


def test_tells_how_far_it_is():
    names = []
    spreads(plans(), 0.1, 1, 0, names.append)
    assert names == list(NAMES)


@pytest.mark.parametrize(
    ("spread", "draws", "line"), [(-0.1, 1, "a spread of -0.1 is negative"), (0.1, 0, "0 draws tell nothing")]
)
def test_absurd_numbers(spread, draws, line):
    with pytest.raises(ValueError, match=line):
        spreads(plans(), spread, draws, 0)
