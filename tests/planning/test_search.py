from random import Random

import numpy as np
import pytest

from jaxpipe.costs.table import CostTable, Link, PieceCost
from jaxpipe.planning.candidate import PLAIN, Candidate, make_space, score, to_plan
from jaxpipe.planning.moves import moves_of
from jaxpipe.planning.plan import check
from jaxpipe.planning.search import search
from jaxpipe.planning.simulator import simulate
from jaxpipe.planning.starts import SETTINGS, starts

WORDS = ("partition", "placement", "schedule", "recompute")


def table(seed=0, count=7, limit=None):
    random = Random(seed)
    pieces = (
        PieceCost(
            f"p{i}", "k", *(random.randint(1, 9) for _ in range(4)), random.randint(1, 5), output_bytes=1
        )
        for i in range(count)
    )
    return CostTable("unit", tuple(pieces), Link(0.5), limit)


def found(space, evaluations=120, seed=0, words=WORDS, go_on=lambda makespan: True, begin=None):
    """What a search finds, and the makespans that it was asked whether to go on after."""
    told = []

    def count(makespan):
        told.append(makespan)
        return go_on(makespan)

    begin = starts(space, words) if begin is None else begin
    return search(space, begin, SETTINGS, moves_of(words), evaluations, seed, count), told


def makespans(results):
    return [scored.makespan for scored in results]


@pytest.mark.parametrize("microbatches", [4, 50])
def test_the_same_for_a_seed(microbatches):
    space = make_space(table(), 3, microbatches, "padded", True)
    (one, told), (two, again), (_, other) = found(space), found(space), found(space, seed=1)
    assert [scored.candidate for scored in one] == [scored.candidate for scored in two]
    assert told == again
    assert told != other


@pytest.mark.parametrize("microbatches", [4, 50])
@pytest.mark.parametrize("evaluations", [1, 2, 7, 40, 100, 700])
def test_evaluations_are_counted(evaluations, microbatches):
    """A space with more candidates than evaluations takes them all."""
    space = make_space(table(count=9), 3, microbatches, "padded", True)
    results, told = found(space, evaluations)
    assert len(told) == evaluations
    assert results


def test_no_candidate_is_evaluated_twice():
    """Three pieces on two devices: two partitions."""
    space = make_space(table(count=3), 2, 3, "padded", False)
    start = Candidate((0, 1, 3), (0, 1), (False,) * 3, PLAIN)
    told = []
    results = search(
        space, [start], (), moves_of(("partition",)), 50, 0, lambda time: told.append(time) or True
    )
    assert {scored.candidate.bounds for scored in results} == {(0, 1, 3), (0, 2, 3)}
    assert len(told) == 2


@pytest.mark.parametrize("stop", [1, 5, 60])
@pytest.mark.parametrize("microbatches", [4, 50])
def test_stops_when_told(stop, microbatches):
    space = make_space(table(), 3, microbatches, "padded", True)
    left = iter(range(stop - 1, -1, -1))
    results, told = found(space, 90, go_on=lambda makespan: next(left) > 0)
    assert len(told) == stop
    assert results


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("microbatches", "limit"), [(5, None), (5, 60), (40, None), (40, 60)])
def test_no_slower_than_any_start(seed, microbatches, limit):
    space = make_space(table(seed, limit=limit), 2, microbatches, "ideal", True)
    begin = starts(space, WORDS)
    results, told = found(space, 150, seed, begin=begin)
    best = min(score(space, start).makespan for start in begin)
    assert makespans(results) == sorted(makespans(results))
    assert results[0].makespan <= best < np.inf
    if microbatches == 5:  # nothing is projected
        assert results[0].makespan == min(told)


def test_many_microbatches_are_projected():
    """What is compared with few micro-batches is made with all, and the step is as long as it says."""
    costs = table(count=9)
    space = make_space(costs, 2, 60, "padded", True)
    results, told = found(space, 300)
    plan = to_plan(space, "x", results[0])
    check(plan)
    assert plan.microbatches == 60
    assert simulate(plan, costs).makespan == pytest.approx(results[0].makespan)
    assert results[0].makespan == pytest.approx(min(told), rel=0.02)
    total = 60 * sum(piece.total for piece in costs.pieces) / 2
    assert results[0].makespan <= 1.05 * total


def test_nothing_where_nothing_fits():
    space = make_space(table(limit=1), 2, 4, "ideal", True)
    results, told = found(space, 50)
    assert results == []
    assert set(told) == {np.inf}
    assert len(told) <= 50
