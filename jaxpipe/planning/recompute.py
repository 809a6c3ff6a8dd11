"""Which pieces of a stage to recompute so that its memory fits: a knapsack solved for every stage at once.

Memory is counted as `stages.stage_costs` and `memory.memory_timelines` do for 1F1B: a device holds the state
of its stage and the stashes of as many micro-batches as are in flight there.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpipe.costs.table import CostTable
from jaxpipe.planning.stages import input_bytes

MOST_CHOICES = 1024
"""Choices kept for one run of pieces; see `_grow`."""


class _Choices(NamedTuple):
    """Ways to recompute a run of pieces, none of which is beaten in both time and memory by another.

    added: time that the recomputed forwards take, ascending. stash: bytes of one micro-batch, descending.
    origin: index of the choice in the run without its last piece, plus the number of those choices if the
      last piece is recomputed.
    """

    added: np.ndarray
    stash: np.ndarray
    origin: np.ndarray


_NO_PIECES = _Choices(np.zeros(1), np.zeros(1), np.zeros(1, np.int64))


def in_flight(devices: int, microbatches: int) -> np.ndarray:
    """The most micro-batches that each device of 1F1B holds: devices - s, or all when there are fewer."""
    return np.minimum(np.arange(devices, 0, -1), microbatches)


class Runs(NamedTuple):
    """Costs of every run of pieces, [i, j] for the pieces i to j - 1, and where it may stand.

    work: time of one micro-batch without recompute. again: what all recomputing that saves memory adds.
    state: resident bytes. stash, smallest: bytes of one micro-batch with nothing or all that recomputed.
    possible: [s, i, j], whether the other devices still get a piece each when device s holds the run.
    flight: [s], micro-batches in flight on each device of 1F1B.
    allowed: [s, i, j], bytes that the stash of one micro-batch may take under the memory limit.
    """

    work: np.ndarray
    again: np.ndarray
    state: np.ndarray
    stash: np.ndarray
    smallest: np.ndarray
    possible: np.ndarray
    flight: np.ndarray
    allowed: np.ndarray


def sums(values: Sequence[float]) -> np.ndarray:
    """[i, j]: sum of the values i to j - 1 (negative where j < i)."""
    prefix = np.concatenate([[0.0], np.cumsum(values)])
    return prefix[None] - prefix[:, None]


def runs(costs: CostTable, devices: int, microbatches: int) -> Runs:
    """All runs of pieces of a table on devices of 1F1B, one stage a device."""
    pieces, count = costs.pieces, len(costs.pieces)
    inputs = [input_bytes(costs, i) for i in range(count)]
    stage, start, stop = np.ogrid[:devices, : count + 1, : count + 1]
    before, after = stage, devices - 1 - stage
    state = costs.state_factor * sums([piece.param_bytes for piece in pieces])
    limit = np.inf if costs.memory_limit_bytes is None else costs.memory_limit_bytes
    flight = in_flight(devices, microbatches)
    return Runs(
        work=sums([piece.total for piece in pieces]),
        again=sums([piece.F * (size < piece.stash_bytes) for piece, size in zip(pieces, inputs)]),
        state=state,
        stash=sums([piece.stash_bytes for piece in pieces]),
        smallest=sums([min(size, piece.stash_bytes) for piece, size in zip(pieces, inputs)]),
        possible=(start < stop)
        & (start >= before)
        & ((start > 0) | (before == 0))
        & (count - stop >= after)
        & ((stop < count) | (after == 0)),
        flight=flight,
        allowed=(limit - state) / flight[:, None, None],
    )


def all_or_nothing(all_runs: Runs) -> np.ndarray:
    """Time that recompute adds to each run on each device, [s, i, j], if it recomputes all or nothing.

    It is infinite where a run cannot stand or does not fit.
    """
    again = np.where(all_runs.smallest <= all_runs.allowed, all_runs.again, np.inf)
    return np.where(all_runs.possible, np.where(all_runs.stash <= all_runs.allowed, 0.0, again), np.inf)


def least_added(all_runs: Runs, costs: CostTable, longest: float) -> np.ndarray:
    """As `all_or_nothing`, with the set of recomputed pieces that adds least.

    longest: runs with more work are of no interest, and count as not fitting where they need recompute.
    """
    allowed = all_runs.allowed
    added = np.where(all_runs.possible & (all_runs.stash <= allowed), 0.0, np.inf)
    tight = all_runs.possible & (all_runs.stash > allowed) & (all_runs.smallest <= allowed)
    tight &= all_runs.work <= longest
    for start in np.flatnonzero(tight.any(axis=(0, 2))):
        choices, grown = _NO_PIECES, start
        for stop in np.flatnonzero(tight[:, start].any(axis=0)):
            while grown < stop:
                choices = _grow(choices, costs, grown)
                grown += 1
            stages = np.flatnonzero(tight[:, start, stop])
            first = np.searchsorted(-choices.stash, -allowed[stages, start, stop])
            added[stages, start, stop] = np.append(choices.added, np.inf)[first]
    return added


def _grow(choices: _Choices, costs: CostTable, piece: int) -> _Choices:
    """The choices for a run with one piece more (Nemhauser and Ullmann 1969, Management Science 15(9)).

    Alike pieces make equal choices, so in models of few kinds their number stays small. Above MOST_CHOICES
    only so many, evenly spread with both ends, are kept: what is found then still fits, but may take a
    little longer than need be.
    """
    stash, smaller = costs.pieces[piece].stash_bytes, input_bytes(costs, piece)
    added, stashes = choices.added, choices.stash + stash
    if smaller < stash:
        added = np.concatenate([added, choices.added + costs.pieces[piece].F])
        stashes = np.concatenate([stashes, choices.stash + smaller])
    order = np.lexsort((stashes, added))
    least = np.minimum.accumulate(stashes[order])
    order = order[np.concatenate([[True], least[1:] < least[:-1]])]
    if len(order) > MOST_CHOICES:
        order = order[np.linspace(0, len(order) - 1, MOST_CHOICES).astype(np.int64)]
    return _Choices(added[order], stashes[order], order)


def policies(costs: CostTable, bounds: Sequence[int], microbatches: int) -> tuple[str, ...]:
    """The recompute policy of every piece that adds least time to each stage of 1F1B, one stage a device.

    Raises:
      ValueError: some stage does not fit even with all recomputed.
    """
    limit = costs.memory_limit_bytes
    result = ["none"] * len(costs.pieces)
    for stage, flight in enumerate(in_flight(len(bounds) - 1, microbatches)):
        run = range(bounds[stage], bounds[stage + 1])
        pieces = [costs.pieces[i] for i in run]
        state = costs.state_factor * sum(piece.param_bytes for piece in pieces)
        allowed = np.inf if limit is None else (limit - state) / flight
        if sum(piece.stash_bytes for piece in pieces) <= allowed:
            continue
        steps = [_NO_PIECES]
        for i in run:
            steps.append(_grow(steps[-1], costs, i))
        fits = np.flatnonzero(steps[-1].stash <= allowed)
        if not fits.size:
            raise ValueError(
                f"stage {stage} of bounds {list(bounds)} exceeds {limit} bytes with all recomputed"
            )
        choice = fits[0]
        for i, before, after in reversed(list(zip(run, steps, steps[1:]))):
            again, choice = divmod(after.origin[choice], len(before.added))
            result[i] = "full" if again else "none"
    return tuple(result)
