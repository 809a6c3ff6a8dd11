"""The joint tuner: partition, placement, schedule, recompute, attention and vocabulary in one search."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jaxpipe.costs.table import CostTable
from jaxpipe.planning.by_piece import by_piece
from jaxpipe.planning.candidate import Scored, Space, make_space, score, to_plan
from jaxpipe.planning.head_split import split_vocabulary
from jaxpipe.planning.leanest import leanest, too_small
from jaxpipe.planning.moves import moves_of
from jaxpipe.planning.partition import check_counts
from jaxpipe.planning.plan import Plan
from jaxpipe.planning.polish import polish
from jaxpipe.planning.rotated import rotated_plans
from jaxpipe.planning.search import ROUNDS, search
from jaxpipe.planning.simulator import simulate
from jaxpipe.planning.starts import SETTINGS, lean_starts, starts

WORDS = ("partition", "placement", "schedule", "recompute", "attention", "head")
"""What can be tuned."""
USUAL = WORDS[:-1]
"""What is tuned unless someone asks: shards of a head are planned, but the executor has no code for them."""
ACTIONS = 20_000_000
"""Actions that a search schedules unless told how often to evaluate: some seconds' worth,"""
FEWEST, MOST = 1000, 10_000
"""but at least and at most so many evaluations."""
NEAR = 0.01
"""Plans so much slower than the best are finalists, too."""
FINALISTS = 3
POLISH_STEPS = 150_000_000
"""Timed actions of the local search on all finalists: about a second,"""
MOST_POLISHED, MOVES_EACH = 12, 50
"""which is shared by so many finalists as get MOVES_EACH moves an action, FINALISTS at least. With
MOST_POLISHED it also begins at the same plans with every piece in a stage of its own."""
PROBE = 8
"""One part in so many of the evaluations goes to each number of shards, before the best gets the rest."""

GoOn = Callable[[int, float], bool]
"""Told after every evaluation how many were made and the least makespan so far; whether to go on."""


class Tuned(NamedTuple):
    """A plan and the costs that it is about: those given, or with shards in place of the head.

    makespan: by `simulator.simulate`.
    """

    plan: Plan
    costs: CostTable
    makespan: float


def check_words(words: Collection[str]) -> None:
    """Raises ValueError for a word that is not in WORDS."""
    for word in words:
        if word not in WORDS:
            raise ValueError(f"cannot tune {word!r}; known: {', '.join(WORDS)}")


def usual_evaluations(devices: int, microbatches: int) -> int:
    """How many schedules a search makes: ACTIONS over those of two stages a device."""
    actions = 6 * devices * min(microbatches, ROUNDS * devices)
    return max(FEWEST, min(MOST, ACTIONS // actions))


def tune(
    costs: CostTable,
    devices: int,
    microbatches: int,
    words: Collection[str] = USUAL,
    memory_model: str = "padded",
    evaluations: int | None = None,
    seed: int = 0,
    given: Sequence[Plan] = (),
    go_on: GoOn = lambda made, best: True,
) -> tuple[Tuned, ...]:
    """The best plans found, the best first, each within the memory limit of `costs`.

    Deterministic, unless `go_on` ends the search early. Plans that differ by less than NEAR are all returned,
    at most FINALISTS, none slower than the best of `given`, so that the time on ticks may choose among them.

    words: what to tune, of WORDS; the rest is as in 1F1B on layers split evenly by number.
    memory_model: "padded" or "ideal", as in `memory`.
    evaluations: schedules made in the search; by default `usual_evaluations`.
    given: plans for the same costs that the result must not be slower than, such as named ones.

    Raises:
      ValueError: as `check_words`; there are no evaluations, or more devices than pieces; nothing found
        fits, with what the leanest plan needs.
    """
    if evaluations is None:
        evaluations = usual_evaluations(devices, microbatches)
    check_words(words)
    if evaluations < 1:
        raise ValueError(f"a search of {evaluations} evaluations finds nothing; expected at least 1")
    check_counts(len(costs.pieces), devices)
    split = "schedule" in words
    spaces = [
        make_space(table, devices, microbatches, memory_model, split)
        for table in _tables(costs, devices, words)
    ]
    meter = _Meter(evaluations, go_on)
    found: list[tuple[Scored, Space]] = []
    if len(spaces) > 1:
        for space in spaces:
            found += _search(space, words, min(max(1, evaluations // PROBE), meter.left()), seed, meter)
        found.sort(key=_makespan)
    space = found[0][1] if found else spaces[0]
    found = sorted(found + _search(space, words, meter.left(), seed, meter), key=_makespan)
    count = _number_polished(found)
    plans = [(to_plan(space, "tuned", scored), space.costs) for scored, space in found[:count]]
    if "attention" in words:
        rotated = rotated_plans(costs, devices, microbatches, "recompute" in words, split)
        plans += [(plan, costs) for plan in rotated]
    judged = _judged([*plans, *((plan, costs) for plan in given)], memory_model)
    if not judged:
        judged = _leanest(spaces, words, memory_model)
    best_given = min((t.makespan for t in judged if t.plan in given), default=np.inf)
    if split and not meter.stopped:
        begun = judged[:count]
        if count == MOST_POLISHED and "placement" in words:
            begun += [t._replace(plan=by_piece(t.plan)) for t in begun]
        steps = POLISH_STEPS // len(begun)
        polished = [(_polished(t, memory_model, steps, seed), t.costs) for t in begun]
        judged = _judged([(t.plan, t.costs) for t in judged] + polished, memory_model)
    slowest = min(judged[0].makespan * (1 + NEAR), best_given)
    final = [t for t in judged if t.makespan <= slowest][:FINALISTS]
    return tuple(t._replace(plan=replace(t.plan, name="tuned")) for t in final)


class _Meter:
    """Counts evaluations; called with the makespan of each, it says whether to go on."""

    def __init__(self, evaluations: int, go_on: GoOn):
        self.evaluations, self.go_on = evaluations, go_on
        self.made, self.best, self.stopped = 0, np.inf, False

    def __call__(self, makespan: float) -> bool:
        self.made, self.best = self.made + 1, min(self.best, makespan)
        self.stopped = not self.go_on(self.made, self.best)
        return not self.stopped

    def left(self) -> int:
        """Evaluations that may still be made."""
        return 0 if self.stopped else self.evaluations - self.made


def _tables(costs: CostTable, devices: int, words: Collection[str]) -> list[CostTable]:
    """The costs with the vocabulary whole and, where it may be split, in several numbers of shards."""
    shards = sorted({2, 4, 8, devices, 2 * devices} if "head" in words else ())
    embeddings = (1,) if costs.memory_limit_bytes is None else (1, 0)
    tables = [costs]
    for head in shards:
        tables += [split_vocabulary(costs, head, embedding or head) for embedding in embeddings]
    return list(dict.fromkeys(tables))


def _search(
    space: Space, words: Collection[str], evaluations: int, seed: int, meter: _Meter
) -> list[tuple[Scored, Space]]:
    if evaluations < 1:
        return []
    settings = SETTINGS if "schedule" in words else ()
    found = search(space, starts(space, words), settings, moves_of(words), evaluations, seed, meter)
    return [(scored, space) for scored in found]


def _leanest(spaces: Sequence[Space], words: Collection[str], memory_model: str) -> list[Tuned]:
    """The start that needs least memory, which a short search may not come to.

    Raises:
      ValueError: it does not fit.
    """
    space, candidate, least = leanest((s, start) for s in spaces for start in lean_starts(s, words))
    scored = score(space, candidate)
    plans = [(to_plan(space, "tuned", scored), space.costs)] if scored.makespan < np.inf else []
    judged = _judged(plans, memory_model)
    if not judged:
        raise ValueError(too_small(space.limit, least))
    return judged


def _makespan(found: tuple[Scored, Space]) -> float:
    return found[0].makespan


def _number_polished(found: Sequence[tuple[Scored, Space]]) -> int:
    """How many finalists the local search begins at; one move takes as long as there are actions."""
    actions = max((int(scored.rows.count_D.sum()) for scored, _ in found), default=1)
    return max(FINALISTS, min(MOST_POLISHED, POLISH_STEPS // (MOVES_EACH * actions**2)))


def _judged(plans: Sequence[tuple[Plan, CostTable]], memory_model: str) -> list[Tuned]:
    """Those that fit, the fastest first, each once."""
    judged = []
    for plan, costs in dict.fromkeys(plans):
        simulation = simulate(plan, costs, memory_model=memory_model)
        limit = costs.memory_limit_bytes
        if limit is None or max(simulation.peak_bytes) <= limit:
            judged.append(Tuned(plan, costs, simulation.makespan))
    return sorted(judged, key=lambda tuned: tuned.makespan)


def _polished(tuned: Tuned, memory_model: str, steps: int, seed: int) -> Plan:
    """The plan after a local search on the order of its actions."""
    plan, costs, limit = tuned.plan, tuned.costs, tuned.costs.memory_limit_bytes
    if limit is None:
        limits = [np.inf] * plan.devices
    elif memory_model == "ideal":
        limits = [limit] * plan.devices
    else:  # what fits once padded may do so still if no device holds more than it does now
        limits = simulate(plan, costs).peak_bytes
    return polish(plan, costs, limits, steps, seed)
