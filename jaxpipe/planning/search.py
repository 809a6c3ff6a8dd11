"""Search among candidates: bottleneck-guided random moves with rollback, from the best of several starts.

A climb accepts a change that makes the step a little slower, less and less so towards its end (simulated
annealing), and goes back to its best candidate when nothing better has come for a while. Chance comes from a
seed and the end from a number of evaluations, so a search finds the same again.
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random

import numpy as np

from jaxpipe.planning.candidate import Candidate, Scored, Space, loads, score
from jaxpipe.planning.list_scheduler import Setting
from jaxpipe.planning.moves import Move, change_setting

ROUNDS = 4
"""Micro-batches a device that candidates are compared with; where a step has more, the rest is projected."""
TRIED = 8
"""Starts that are tried with all settings; the others only as far as a quarter of the evaluations goes."""
LENGTH = 600
"""Evaluations of a climb."""
AGAIN = 50
"""Every second climb begins at one of so many best candidates, the others at a start each."""
HEAT = 0.02
"""How much slower an accepted change may be at first, as a part of the makespan."""
STALE = 60
"""Evaluations without a better candidate after which a climb goes back to its best."""
TRIES = 20
"""Changes looked at for each evaluation at most: many cannot be, or give one device too much work."""
KEPT = 12
"""Candidates, of different stages, that are compared again with all micro-batches."""
LAST = 1 / 16
"""Part of the evaluations that tune the scheduler's setting with all micro-batches."""

GoOn = Callable[[float], bool]
"""Told the makespan of every evaluation (projected, infinite for none); whether there is time for more."""


def search(
    space: Space,
    starts: Sequence[Candidate],
    settings: Sequence[Setting],
    moves: Mapping[Move, int],
    evaluations: int,
    seed: int,
    go_on: GoOn,
) -> list[Scored]:
    """The best candidates found, the best first; all have a schedule. Empty if no start has one.

    settings: those that the best starts are tried with, beside their own.
    moves: how often each is tried.
    evaluations: at most so many, the starts among them.
    """
    short = space._replace(microbatches=min(space.microbatches, ROUNDS * space.devices))
    last = int(LAST * evaluations) if short != space and change_setting in moves else 0
    chance = Random(seed)
    found: dict[Candidate, float] = {}

    def try_all(candidates: Sequence[Candidate]) -> bool:
        for candidate in candidates[: max(1, evaluations - last) - len(found)]:
            if candidate not in found:
                found[candidate] = _projected(short, space, candidate, np.inf)
                if not go_on(found[candidate]):
                    return False
        return True

    running = try_all(starts)
    for setting in settings[: max(1, evaluations // (4 * max(1, len(starts))))]:
        running = running and try_all([start._replace(setting=setting) for start in starts])
    best = _different(_best(found))
    running = running and try_all([c._replace(setting=s) for c in best[:TRIED] for s in settings])
    left = evaluations - last - len(found)
    origins = _different(_best(found))
    climbs = 0
    while running and moves and origins and left > 0:
        fresh = origins[climbs // 2 :] if climbs % 2 == 0 else []
        origin = fresh[0] if fresh else chance.choice(_best(found)[:AGAIN])
        running = _climb(short, space, origin, found, moves, min(left, LENGTH), chance, go_on)
        left, climbs = left - LENGTH, climbs + 1
    finalists = [score(space, candidate) for candidate in _different(_best(found))[:KEPT]]
    if last and running and finalists:
        best = min(finalists, key=lambda scored: scored.makespan)
        exact = {best.candidate: best.makespan}
        _climb(space, space, best.candidate, exact, {change_setting: 1}, last, chance, go_on)
        finalists += [score(space, candidate) for candidate in _best(exact)[:1]]
    return sorted((s for s in finalists if s.makespan < np.inf), key=lambda scored: scored.makespan)


def _climb(
    short: Space,
    space: Space,
    start: Candidate,
    found: dict[Candidate, float],
    moves: Mapping[Move, int],
    evaluations: int,
    chance: Random,
    go_on: GoOn,
) -> bool:
    """One climb; adds what it evaluates to `found`. Whether there is time for more."""
    kinds, weights = list(moves), list(moves.values())
    current, value = start, found[start]
    best, least, stale, done = current, value, 0, 0
    load_D = loads(short, current)
    for _ in range(TRIES * evaluations):
        if done == evaluations:
            break
        (move,) = chance.choices(kinds, weights)
        changed = move(current, load_D, chance)
        heat = HEAT * (1 - done / evaluations)
        threshold = value * (1 + heat * chance.random())
        if changed is None or space.microbatches * loads(space, changed).max() > threshold:
            continue
        if changed not in found:
            done += 1
            found[changed] = _projected(short, space, changed, threshold)
            if not go_on(found[changed]):
                return False
        stale += 1
        if found[changed] <= threshold:
            current, value = changed, found[changed]
            load_D = loads(short, current)
        if value < least:
            best, least, stale = current, value, 0
        elif stale > STALE:
            current, value, stale = best, least, 0
            load_D = loads(short, current)
    return True


def _projected(short: Space, space: Space, candidate: Candidate, threshold: float) -> float:
    """The makespan with all micro-batches, those that `short` lacks at the pace of the busiest device.

    Infinite where it would be above the threshold.
    """
    rest = (space.microbatches - short.microbatches) * float(loads(short, candidate).max())
    return score(short, candidate, threshold - rest).makespan + rest


def _best(found: Mapping[Candidate, float]) -> list[Candidate]:
    """Candidates that have a schedule, the best first."""
    possible = [candidate for candidate, makespan in found.items() if makespan < np.inf]
    return sorted(possible, key=found.get)


def _different(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The first of those with the same stages."""
    first = {}
    for candidate in candidates:
        first.setdefault((candidate.bounds, candidate.homes, candidate.full), candidate)
    return list(first.values())
