import re
from dataclasses import replace
from itertools import combinations, pairwise, product
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxpipe.costs.table import CostTable, Link, PieceCost
from jaxpipe.planning import tune as tuner
from jaxpipe.planning.judge_plan import floating_stages
from jaxpipe.planning.layers import even_layers
from jaxpipe.planning.named import NAMED, named_plan
from jaxpipe.planning.plan import check
from jaxpipe.planning.schedules import one_f_one_b
from jaxpipe.planning.simulator import lower_bound, simulate
from jaxpipe.planning.tune import FINALISTS, NEAR, WORDS, tune, usual_evaluations
from tests.planning.exact import best_plan, blank_plan, partitions

TOO_SMALL = re.compile(
    r"memory limit of (\S+) bytes a device is too small: the leanest plan found needs at least (\S+) bytes "
    r"on device \d, (\S+) bytes of it for parameters, gradients and optimizer state and (\S+) bytes for what "
    r"one micro-batch stashes"
)


@pytest.fixture(autouse=True)
def _short_polish(monkeypatch):
    monkeypatch.setattr(tuner, "POLISH_STEPS", 600_000)


def table(seed=0, layers=2, limit=None):
    """An embedding, layers of attention in three pieces, a head without a forward of its own."""
    random = Random(seed)

    def costs(name, kind, low=1, params=True, forward=True):
        f, i, w = (random.randint(low, 9) for _ in range(3))
        sizes = (
            random.randint(1, 5) * params,
            random.randint(1, 6),
            random.randint(0, 6),
            random.randint(1, 4),
        )
        return PieceCost(name, kind, f * forward, i, w, *sizes)

    pieces = [costs("embed", "embed", 0)]
    for n in range(layers):
        pieces.append(costs(f"{n}/pre", "attention_pre"))
        pieces.append(costs(f"{n}/core", "attention_core", params=False))
        pieces.append(costs(f"{n}/post", "mlp"))
    pieces.append(costs("head", "head", forward=False))
    return CostTable("unit", tuple(pieces), Link(0.5, 8), limit, 2)


def assert_right(found, memory_model):
    """Complete plans within the limit, as long as they say, the best first and the others near."""
    assert 1 <= len(found) <= FINALISTS
    for plan, costs, makespan in found:
        check(plan, floating_stages(plan, costs))
        simulation = simulate(plan, costs, memory_model=memory_model)
        assert simulation.makespan == makespan
        assert found[0].makespan <= makespan <= found[0].makespan * (1 + NEAR)
        assert plan.name == "tuned"
        if costs.memory_limit_bytes is not None:
            assert max(simulation.peak_bytes) <= costs.memory_limit_bytes
    assert [t.makespan for t in found] == sorted(t.makespan for t in found)
    assert len({plan for plan, _, _ in found}) == len(found)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 50),
    st.integers(1, 3),
    st.integers(1, 6),
    st.sets(st.sampled_from(WORDS)),
    st.sampled_from(["padded", "ideal"]),
    st.integers(1, 150),
    st.sampled_from([1, 30]),
)
def test_within_any_limit_or_one_line_why_not(seed, devices, microbatches, words, model, limit, evaluations):
    costs = table(seed, layers=max(2, devices), limit=limit)
    try:
        found = tune(costs, devices, microbatches, words, model, evaluations, seed)
    except ValueError as error:
        allowed, needed, state, stashed = (float(size) for size in TOO_SMALL.fullmatch(str(error)).groups())
        assert allowed == limit < needed
        assert needed == pytest.approx(state + stashed, rel=1e-3)
        return
    assert_right(found, model)
    assert all(t.makespan >= lower_bound(t.costs, devices, microbatches) * (1 - 1e-9) for t in found)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 50),
    st.integers(1, 3),
    st.sets(st.sampled_from(["partition", "placement", "schedule", "recompute"])),
    st.sampled_from(["padded", "ideal"]),
    st.sampled_from([1, 20]),
)
@example(2, 2, {"partition", "placement", "schedule", "recompute"}, "ideal", 1)
def test_the_limit_that_the_error_names_is_enough(seed, devices, words, model, evaluations):
    """Even where the search has one evaluation; below it is not. (Padded, less recompute may need less.)"""
    words = words - {"recompute"} if model == "padded" else words
    costs = table(seed, layers=3, limit=1)
    with pytest.raises(ValueError, match=TOO_SMALL) as error:
        tune(costs, devices, 5, words, model, evaluations)
    needed = float(TOO_SMALL.fullmatch(str(error.value))[2])
    enough = replace(costs, memory_limit_bytes=needed)
    assert_right(tune(enough, devices, 5, words, model, evaluations), model)
    with pytest.raises(ValueError, match=TOO_SMALL):
        tune(replace(costs, memory_limit_bytes=needed - 0.5), devices, 5, words, model, evaluations)


def test_the_error_by_hand():
    """Two bytes of state for each of 3 and 4 parameters, and the stash of one micro-batch."""
    pieces = (PieceCost("a", "k", 1, 1, 1, 3, 5), PieceCost("b", "k", 1, 1, 1, 4, 7))
    costs = CostTable("unit", pieces, memory_limit_bytes=14, state_factor=2)
    expected = (
        "memory limit of 14 bytes a device is too small: the leanest plan found needs at least 15 bytes on "
        "device 1, 8 bytes of it for parameters, gradients and optimizer state and 7 bytes for what one "
        "micro-batch stashes"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        tune(costs, 2, 4, memory_model="ideal")
    thirds = replace(costs, state_factor=2 / 3 + 1)  # 4 * 5 / 3 + 7
    with pytest.raises(ValueError, match=r" at least 13\.67 bytes on device 1, 6\.667 bytes of it "):
        tune(replace(thirds, memory_limit_bytes=13), 2, 4, memory_model="ideal")
    with pytest.raises(ValueError, match=r" at least 23\.34 bytes on device 1, 16\.33 bytes of it "):
        tune(replace(thirds, state_factor=4 + 1 / 12), 2, 4, memory_model="ideal")
    large = tuple(replace(p, param_bytes=p.param_bytes * 10**9) for p in pieces)
    with pytest.raises(
        ValueError, match=r"^memory limit of 0\.5 GB .* at least 8\.001 GB on device 1, 8 GB of it "
    ):
        tune(replace(costs, pieces=large, memory_limit_bytes=5 * 10**8), 2, 4, memory_model="ideal")


@pytest.mark.parametrize("limit", [None, 400])
@pytest.mark.parametrize("words", [(), ("partition",), ("attention",), WORDS], ids=str)
@pytest.mark.parametrize(("devices", "microbatches"), [(2, 4), (1, 3)])
def test_no_slower_than_what_is_given(devices, microbatches, words, limit):
    """All named plans that take the numbers."""
    costs, plans = table(3, layers=3, limit=limit), []
    for name in NAMED:
        try:
            plans.append(named_plan(name, costs, devices, microbatches))
        except ValueError:
            continue
    assert len(plans) > 10
    fits = [
        simulation.makespan
        for simulation in (simulate(plan, costs, memory_model="padded") for plan in plans)
        if limit is None or max(simulation.peak_bytes) <= limit
    ]
    found = tune(costs, devices, microbatches, words, evaluations=20, given=plans)
    assert_right(found, "padded")
    assert max(t.makespan for t in found) <= min(fits)


def test_without_words_it_is_1f1b_on_even_layers():
    costs = table(layers=4)
    (found,) = tune(costs, 2, 5, ())
    assert found.plan.stage_to_device == (0, 1)
    assert found.plan.stage_bounds == even_layers(costs.pieces, 2)
    assert set(found.plan.recompute) == {"none"}
    usual = replace(found.plan, schedule=one_f_one_b(2, 5))
    assert found.makespan <= simulate(usual, costs).makespan
    assert {action.phase for row in found.plan.schedule for action in row} == {"F", "B"}


def without_neighbours(homes):
    return all(here != there for here, there in pairwise(homes))


@pytest.mark.parametrize("words", [w for n in range(4) for w in combinations(WORDS[:4], n)], ids=str)
def test_words_say_what_changes(words):
    costs = table(2, layers=4, limit=90)
    layers = {low for low, piece in enumerate(costs.pieces) if piece.name.endswith("/pre")}
    for plan, _, _ in tune(costs, 2, 4, words, "ideal", evaluations=300):
        if "placement" not in words:
            assert plan.stage_to_device == (0, 1)
        if words.count("partition") == 0:
            assert set(plan.stage_bounds[1:-1]) <= layers
            if "placement" not in words:
                assert plan.stage_bounds == even_layers(costs.pieces, 2)
        if "schedule" not in words:
            assert {action.phase for row in plan.schedule for action in row} == {"F", "B"}
        if "recompute" not in words:
            assert set(plan.recompute) == {"none"}


def test_every_word_makes_the_step_shorter():
    """Each on a model made for it."""
    layers = tuple(PieceCost(f"l{i}", "k", 1, 1, 1, 1, 2) for i in range(8))
    heavy = (*layers[:7], PieceCost("l7", "k", 6, 6, 6, 1, 2))
    head = PieceCost("head", "head", 0, 12, 6, 1, 2)
    core = [
        piece
        for i in range(4)
        for piece in (PieceCost(f"{i}/a", "k", 1, 1, 1, 1), PieceCost(f"{i}/c", "attention_core", 9, 18, 0))
    ]
    cases = {
        "partition": (CostTable("unit", heavy), 2, 4),
        "placement": (
            CostTable("unit", tuple(replace(p, F=3 if i < 4 else 1) for i, p in enumerate(layers))),
            2,
            8,
        ),
        "schedule": (CostTable("unit", layers), 2, 4),
        "attention": (CostTable("unit", (*core, PieceCost("end", "k", 1, 1, 1))), 4, 4),
        "head": (CostTable("unit", (*layers[:3], head)), 2, 8),
    }
    for word, (costs, devices, microbatches) in cases.items():
        rest = {"head": ("partition", "placement", "schedule"), "placement": ("schedule",)}.get(word, ())
        less = tune(costs, devices, microbatches, rest, evaluations=100)[0].makespan
        more = tune(costs, devices, microbatches, (*rest, word), evaluations=100)[0].makespan
        assert more < less, word
    tight = CostTable("unit", tuple(replace(p, output_bytes=1, stash_bytes=6) for p in layers), Link(), 34)
    with_less = tune(tight, 2, 4, ("recompute",), "ideal")[0].makespan
    assert with_less < tune(tight, 2, 4, (), "ideal")[0].makespan


def test_a_whole_head_where_shards_do_not_pay():
    costs = table(layers=3)
    assert all(t.costs == costs for t in tune(costs, 2, 4, evaluations=100))
    cheap = replace(costs, pieces=(*costs.pieces[:-1], PieceCost("head", "head", 0, 0, 0)))
    words = ("partition", "placement", "schedule", "head")
    assert tune(cheap, 2, 4, words, evaluations=200)[0].makespan > 0


@pytest.mark.parametrize("words", [("partition", "schedule"), WORDS], ids=str)
def test_deterministic(words):
    costs = table(7, layers=3, limit=120)
    one, two = (tune(costs, 2, 5, words, evaluations=60, seed=4) for _ in range(2))
    assert one == two


@pytest.mark.parametrize("words", [("partition", "placement", "schedule"), WORDS], ids=str)
@pytest.mark.parametrize("evaluations", [1, 9, 100])
def test_counts_evaluations_and_tells_the_best(words, evaluations):
    told = []
    costs = table(layers=3, limit=200)
    tune(
        costs,
        2,
        20,
        words,
        evaluations=evaluations,
        go_on=lambda made, best: told.append((made, best)) or True,
    )
    assert [made for made, _ in told] == list(range(1, evaluations + 1))
    assert all(later <= earlier for (_, earlier), (_, later) in pairwise(told))


@pytest.mark.parametrize("words", [("partition", "schedule"), WORDS], ids=str)
def test_stops_when_told(words):
    told = []
    costs = table(layers=3)
    found = tune(costs, 2, 5, words, go_on=lambda made, best: told.append(made) or made < 7)
    assert told == list(range(1, 8))
    assert_right(found, "padded")


def test_bad_input():
    costs = table()
    with pytest.raises(
        ValueError,
        match=r"^cannot tune 'speed'; known: partition, placement, schedule, recompute, attention, head$",
    ):
        tune(costs, 2, 4, ("partition", "speed"))
    with pytest.raises(ValueError, match=r"^a search of 0 evaluations finds nothing; expected at least 1$"):
        tune(costs, 2, 4, evaluations=0)
    with pytest.raises(ValueError, match=r"^8 pieces cannot fill 9 devices; expected a piece for each"):
        tune(costs, 9, 4)
    for words in ((), ("placement",), ("schedule", "recompute")):
        with pytest.raises(ValueError, match=r"^2 layers cannot fill 3 devices; expected a layer for each"):
            tune(costs, 3, 4, words)


def test_usual_evaluations():
    assert usual_evaluations(2, 4) == 10_000
    assert usual_evaluations(8, 1000) == usual_evaluations(8, 32) == 10_000
    assert usual_evaluations(16, 1000) == 20_000_000 // (6 * 16 * 64)
    assert usual_evaluations(64, 512) == 1000


def small(seed, pieces):
    random = Random(seed)
    return CostTable(
        "unit",
        tuple(
            PieceCost(f"p{i}", "k", *(random.randint(1, 9) for _ in range(3)), 1, 2) for i in range(pieces)
        ),
        Link(random.randint(0, 2)),
    )


@pytest.mark.parametrize("seed", range(8))
def test_near_the_best_of_all_partitions(seed):
    costs, microbatches = small(seed, 5 + seed % 2), 4 + seed % 3
    best = best_plan(partitions(costs, (0, 1), microbatches), costs).makespan
    found = tune(costs, 2, microbatches, ("partition", "schedule"), evaluations=200)
    assert best <= found[0].makespan <= 1.04 * best


@pytest.mark.parametrize("seed", range(8))
def test_near_the_best_of_all_placements(seed):
    costs = small(seed, 4)
    every = (
        blank_plan(costs, range(5), homes, 4) for homes in product((0, 1), repeat=4) if len(set(homes)) == 2
    )
    best = best_plan(every, costs).makespan
    found = tune(costs, 2, 4, ("partition", "placement", "schedule"), evaluations=400)
    assert best <= found[0].makespan <= 1.04 * best
