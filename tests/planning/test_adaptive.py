import re
from dataclasses import replace
from itertools import combinations, pairwise, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.costs.table import CostTable, PieceCost
from jaxpipe.planning import recompute
from jaxpipe.planning.adaptive import adapipe, adapipe_objective, mist, mist_objective
from jaxpipe.planning.build import staged_plan
from jaxpipe.planning.named import named_plan
from jaxpipe.planning.partition import balanced
from jaxpipe.planning.schedules import one_f_one_b
from jaxpipe.planning.simulator import simulate

NAMES = ("mist", "adapipe")
SEARCH = {"mist": (mist, mist_objective), "adapipe": (adapipe, adapipe_objective)}


def small_table(data):
    numbers = st.integers(0, 9)
    pieces = tuple(
        PieceCost(f"p{i}", "k", *(data.draw(numbers) for _ in range(5)), output_bytes=data.draw(numbers))
        for i in range(data.draw(st.integers(2, 6)))
    )
    return CostTable("unit", pieces, state_factor=data.draw(st.integers(0, 2)))


def stage_times_and_bytes(costs, devices, microbatches, bounds, policies):
    """F, B and bytes of every stage, spelled out piece by piece; device s of 1F1B has p - s in flight."""
    forward, backward, held = [0] * devices, [0] * devices, [0] * devices
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        for i in range(start, stop):
            piece, again = costs.pieces[i], policies[i] == "full"
            forward[stage] += piece.F
            backward[stage] += piece.I + piece.W + again * piece.F
            received = costs.pieces[i - 1].output_bytes if i else 0
            held[stage] += costs.state_factor * piece.param_bytes
            held[stage] += min(devices - stage, microbatches) * (received if again else piece.stash_bytes)
    return forward, backward, held


def every_choice(costs, devices):
    count = len(costs.pieces)
    for cuts in combinations(range(1, count), devices - 1):
        yield from product([(0, *cuts, count)], product(("none", "full"), repeat=count))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_choice_of_partition_and_recompute_has_a_lower_objective(name, data):
    search, objective = SEARCH[name]
    costs = small_table(data)
    devices = data.draw(st.integers(1, min(4, len(costs.pieces))))
    microbatches = data.draw(st.integers(devices if name == "adapipe" else 1, devices + 3))
    choices = [
        stage_times_and_bytes(costs, devices, microbatches, *choice)
        for choice in every_choice(costs, devices)
    ]
    needed = min(max(held) for *_, held in choices)
    if needed > 1:
        with pytest.raises(ValueError, match="1F1B needs at least"):
            search(replace(costs, memory_limit_bytes=needed - 1), devices, microbatches)
    limit = needed + data.draw(st.integers(0, 30))
    costs = replace(costs, memory_limit_bytes=limit)
    least = min(objective(f, b, microbatches) for f, b, held in choices if max(held) <= limit)
    tuned = search(costs, devices, microbatches)
    assert tuned.objective == pytest.approx(least, rel=1e-8)
    # The plan is what it says it is, and the simulator sees the limit kept.
    forward, backward, _ = stage_times_and_bytes(costs, devices, microbatches, *tuned[:2])
    assert objective(forward, backward, microbatches) == pytest.approx(least, rel=1e-8)
    plan = named_plan(name, costs, devices, microbatches)
    assert (plan.stage_bounds, plan.recompute) == tuned[:2]
    assert max(simulate(plan, costs).peak_bytes) <= limit


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_without_a_limit_mist_is_the_balanced_partition(data):
    costs = small_table(data)
    devices, microbatches = data.draw(st.integers(1, len(costs.pieces))), data.draw(st.integers(2, 9))
    bounds, policies, _ = mist(costs, devices, microbatches)
    assert set(policies) == {"none"}
    assert bounds == balanced([piece.total for piece in costs.pieces], devices)


def test_equally_slow_partitions_are_told_apart_by_their_squares():
    """The first piece outweighs any split of the others; halves are the least squares."""
    pieces = tuple(PieceCost(f"p{i}", "k", time, 0, 0) for i, time in enumerate([8, 1, 1, 1, 1, 1, 1]))
    assert mist(CostTable("unit", pieces), 3, 6).bounds == (0, 1, 4, 7)


def test_a_slower_stage_pays_where_it_saves_recompute_and_micro_batches_are_few():
    """By hand: one and three pieces fit as they are, 3 + 9; two and two only with one recomputed, 8 + 6."""
    pieces = tuple(PieceCost(f"p{i}", "k", 2, 1, 0, stash_bytes=10) for i in range(4))
    costs = CostTable("unit", pieces, memory_limit_bytes=30)
    bounds, policies, objective = mist(costs, 2, 2)
    assert (bounds, set(policies), objective) == ((0, 1, 4), {"none"}, 9 + 12)
    bounds, policies, objective = mist(costs, 2, 8)
    assert (bounds, policies.count("full"), objective) == ((0, 2, 4), 1, 7 * 8 + 14)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_without_a_limit_adapipe_recomputes_nothing_and_no_partition_has_a_lower_objective(data):
    times = data.draw(st.lists(st.tuples(*[st.integers(0, 20)] * 2), min_size=5, max_size=11))
    costs = CostTable("unit", tuple(PieceCost(f"p{i}", "k", f, b, 0) for i, (f, b) in enumerate(times)))
    devices = data.draw(st.integers(3, 5))
    microbatches = devices + data.draw(st.integers(0, 3))
    tuned = adapipe(costs, devices, microbatches)
    assert set(tuned.recompute) == {"none"}
    least = float("inf")
    for cuts in combinations(range(1, len(times)), devices - 1):
        runs = [times[i:j] for i, j in pairwise((0, *cuts, len(times)))]
        forward, backward = ([sum(time[k] for time in run) for run in runs] for k in (0, 1))
        least = min(least, adapipe_objective(forward, backward, microbatches))
    assert tuned.objective == pytest.approx(least, rel=1e-8)


def test_adapipe_comes_near_the_best_1f1b_there_is():
    """Against the exact time of every partition and recompute that fits, on 25 small tables."""
    random, excess = Random(0), {name: [] for name in NAMES}
    while len(excess["mist"]) < 25:
        pieces = tuple(
            PieceCost(
                f"p{i}", "k", *(random.randint(1, 9) for _ in range(5)), output_bytes=random.randint(0, 4)
            )
            for i in range(random.randint(3, 5))
        )
        costs = CostTable("unit", pieces, memory_limit_bytes=random.randint(15, 40))
        devices, microbatches = random.randint(2, 3), random.randint(3, 8)
        best = float("inf")
        for bounds, policies in every_choice(costs, devices):
            forward, backward, held = stage_times_and_bytes(costs, devices, microbatches, bounds, policies)
            if max(held) <= costs.memory_limit_bytes:
                best = min(best, makespan(forward, backward, microbatches))
        if best < float("inf"):
            for name in NAMES:
                time = simulate(named_plan(name, costs, devices, microbatches), costs).makespan
                excess[name].append(time / best - 1)
    assert min(excess["mist"] + excess["adapipe"]) >= 0
    assert max(excess["adapipe"]) < 0.05
    assert sum(excess["adapipe"]) <= sum(excess["mist"]) < 25 * 0.03


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 5), (4, 4), (4, 9), (8, 20)])
def test_both_objectives_are_exact_for_equal_stages(p, m):
    """1F1B on equal stages takes (m + p - 1)(F + B)."""
    for objective in (mist_objective, adapipe_objective):
        assert objective([3] * p, [5] * p, m) == (m + p - 1) * 8


def makespan(forward, backward, microbatches):
    """Exact time of 1F1B on stages of these times."""
    stages = zip(forward, backward)
    costs = CostTable("unit", tuple(PieceCost(f"p{i}", "k", f, b, 0) for i, (f, b) in enumerate(stages)))
    p = len(forward)
    schedule = one_f_one_b(p, microbatches)
    plan = staged_plan("1f1b", costs, microbatches, range(p), schedule, range(p + 1))
    return simulate(plan, costs).makespan


@settings(max_examples=100, deadline=None)
@given(
    times=st.lists(st.tuples(st.integers(40, 60), st.integers(80, 120)), min_size=1, max_size=8),
    extra=st.integers(0, 16),
)
def test_adapipe_is_exact_for_stages_that_differ_by_a_fifth(times, extra):
    forward, backward = zip(*times)
    microbatches = len(times) + extra
    assert adapipe_objective(forward, backward, microbatches) == makespan(forward, backward, microbatches)


def test_where_the_objectives_differ():
    """Two stages of equal F + B: the first with the slow forward, so that the second begins late.

    By hand, m = 2: F0 0-8, 8-16; stage 1 F 8-9, B 9-18; stage 0 B 18-20; stage 1 F 18-19, B 19-28;
    stage 0 B 28-30. AdaPipe: W = 8 + max(1 + 9, 8), E = 2 + max(9 + 1, 2), no steady phase.
    """
    forward, backward = [8, 1], [2, 9]
    assert makespan(forward, backward, 2) == 30
    assert adapipe_objective(forward, backward, 2) == 18 + 12
    assert mist_objective(forward, backward, 2) == 10 + 20
    # By hand, with a fast first stage whose forward is still the slowest: two of them, then all of stage 1.
    forward, backward = [20, 1], [2, 9]
    assert makespan(forward, backward, 2) == 52
    assert adapipe_objective(forward, backward, 2) == 20 + 20 + 1 + 9 + 2
    assert mist_objective(forward, backward, 2) == 22 + 32


def model(layers, limit):
    """Embedding, layers of four kinds of piece and a head as heavy as a layer; memory in MB."""
    kinds = (
        ("pre", 1, 1.1, 0.9, 10, 30, 60),
        ("attn", 2, 3, 0, 0, 40, 20),
        ("post", 0.5, 0.5, 0.4, 4, 30, 20),
        ("mlp", 2, 2, 2, 20, 90, 20),
    )
    pieces = [PieceCost("embed", "embed", 0.1, 0, 0.2, 400, 0, 0, 20)]
    for layer in range(layers):
        pieces += [
            PieceCost(f"{layer}/{kind}", kind, f, i, w, parameters, stash, 0, output)
            for kind, f, i, w, parameters, stash, output in kinds
        ]
    pieces.append(PieceCost("head", "head", 6, 6, 6, 400, 300))
    return CostTable("ms", tuple(pieces), memory_limit_bytes=limit, state_factor=8)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("limit", [None, 6000, 4000, 3500])
def test_two_hundred_pieces_on_sixteen_devices(name, limit):
    costs = model(50, limit)
    plan = named_plan(name, costs, 16, 64)
    simulation = simulate(plan, costs)
    assert max(simulation.peak_bytes) <= (limit or float("inf"))
    assert ("full" in plan.recompute) == (limit is not None)


def test_a_tighter_limit_never_helps():
    costs = [model(12, limit) for limit in (None, 5000, 4200, 3800, 3400)]
    for search in (mist, adapipe):
        objectives = [search(table, 4, 16).objective for table in costs]
        assert objectives == sorted(objectives)
        assert objectives[0] < objectives[-1]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (50, "...."),  # nothing: the first device has two micro-batches in flight, 2 x (10 + 15)
        (49, ".b.."),  # a or b would do, and b is quicker
        (30, ".b.."),  # 2 x 10 and 15 + 15
        (29, ".b.d"),  # the second device has to free some; c would stash the 10 of its input, and is slower
        (19, "ab.d"),
        (14, "abcd"),
    ],
)
def test_of_pieces_that_free_enough_the_quickest_are_recomputed(limit, expected):
    pieces = (
        PieceCost("a", "k", 4, 4, 4, stash_bytes=10),
        PieceCost("b", "k", 1, 5, 6, stash_bytes=15, output_bytes=10),
        PieceCost("c", "k", 6, 6, 6, stash_bytes=15),
        PieceCost("d", "k", 2, 2, 2, stash_bytes=15),
    )
    costs = CostTable("unit", pieces, memory_limit_bytes=limit)
    for search in (mist, adapipe):
        tuned = search(costs, 2, 4)
        assert tuned.bounds == (0, 2, 4)
        assert tuned.recompute == tuple("none" if mark == "." else "full" for mark in expected)


def test_few_kept_choices_still_fit(monkeypatch):
    """More choices than are kept: the limit holds all the same, at a somewhat longer time."""
    costs = model(12, 3800)
    exact = {name: SEARCH[name][0](costs, 4, 16).objective for name in NAMES}
    monkeypatch.setattr(recompute, "MOST_CHOICES", 4)
    for name in NAMES:
        plan = named_plan(name, costs, 4, 16)
        assert max(simulate(plan, costs).peak_bytes) <= 3800
        assert SEARCH[name][0](costs, 4, 16).objective >= exact[name]


def test_what_does_not_fit_says_how_much_would():
    gigabyte = 10**9
    pieces = tuple(
        PieceCost(f"p{i}", "k", 1, 1, 1, 2 * gigabyte + 50_000, 3 * gigabyte, 0, gigabyte) for i in range(4)
    )
    costs = CostTable("s", pieces, memory_limit_bytes=5 * gigabyte, state_factor=2.0)
    # Two pieces a device: 8 of state; the first holds the input of its second piece for two micro-batches,
    # the second those of both for one.
    with pytest.raises(ValueError) as error:
        mist(costs, 2, 8)
    assert re.fullmatch(
        r"1F1B needs at least 10\.001 GB on device [01], because its pieces p\d to p\d hold 8 GB of state "
        r"and, all recomputed, 2 GB of stashes of [12] micro-batches; the limit is 5 GB",
        str(error.value),
    )
    assert set(mist(replace(costs, memory_limit_bytes=10_001 * 10**6), 2, 8).recompute) == {"full"}


def test_what_cannot_be_asked():
    costs = model(1, None)
    with pytest.raises(
        ValueError, match="6 pieces cannot fill 7 devices; expected a piece for each at least"
    ):
        mist(costs, 7, 8)
    with pytest.raises(ValueError, match="'adapipe' on 4 devices takes at least 4 micro-batches, not 3"):
        named_plan("adapipe", costs, 4, 3)
    with pytest.raises(ValueError, match="adapipe on 4 devices takes at least 4 micro-batches, not 3"):
        adapipe(costs, 4, 3)
    with pytest.raises(ValueError, match=r"stage 0 of bounds \[0, 6\] exceeds 1 bytes with all recomputed"):
        recompute.policies(replace(costs, memory_limit_bytes=1), (0, 6), 4)
    assert named_plan("mist", costs, 4, 3).microbatches == 3
