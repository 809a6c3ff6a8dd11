"""1F1B on a partition and a recompute policy tuned together: what AdaPipe and Mist search for.

Both choose, for every stage, how many pieces it holds and which of them are recomputed, so that the state
and the stashes in flight of each device fit costs.memory_limit_bytes. Both take from `recompute` the set
that adds least time to a stage, since either objective grows with the time of any stage. They differ in the
objective, for m micro-batches on p stages with times F and B, B with what is recomputed:

    mist     (m - 1) max(F + B) + sum(F + B): every micro-batch passes all stages once, and the slowest
             stage sets the pace. Only F + B of a stage matters.
    adapipe  W + E + (m - p) max(F + B), see `adapipe_objective`: warm-up and ending phase follow F and B of
             each stage apart, so an early stage, with several forwards in a row, pays more for a slow one.

Neither counts messages between devices. Memory is the ideal model of `simulate`: one program for all devices
allocates more.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from jaxpipe.costs.table import CostTable
from jaxpipe.planning.partition import check_counts
from jaxpipe.planning.recompute import Runs, all_or_nothing, least_added, policies, runs, sums

Objective = Callable[[Sequence[float], Sequence[float], int], float]
"""Time of 1F1B from F and B of each stage and the number of micro-batches."""

_ROUNDING = 1 + 1e-9
"""Objectives nearer to each other than this factor are taken for equal."""


class Tuned(NamedTuple):
    """bounds: of the stages, one a device. recompute: policy of each piece. objective: predicted time."""

    bounds: tuple[int, ...]
    recompute: tuple[str, ...]
    objective: float


def mist_objective(forward: Sequence[float], backward: Sequence[float], microbatches: int) -> float:
    """(m - 1) max(F + B) + sum(F + B) over stages with times F and B.

    The objective of Zhu et al. 2025 (Mist, EuroSys 2025) for micro-batches that are alike.
    """
    times = [f + b for f, b in zip(forward, backward)]
    return (microbatches - 1) * max(times) + sum(times)


def adapipe_objective(forward: Sequence[float], backward: Sequence[float], microbatches: int) -> float:
    """Time of 1F1B as the phases of AdaPipe (Sun et al. 2024, ASPLOS 2024) predict it, for m >= p stages.

    From the last stage to the first, W_s is the time from the first forward of stage s to its first
    backward, E_s that from its last forward to its last backward, and M_s the time of a pair between:

        W_s = F_s + max(W_{s+1} + B_{s+1}, (p - s - 1) F_s)
        E_s = B_s + max(E_{s+1} + F_{s+1}, (p - s - 1) B_s)
        M_s = max(F_s + B_s, M_{s+1})
        T_s = max(W_s + E_s + (m - p + s) M_s, F_s + B_s + T_{s+1})

    T_0 is the result. AdaPipe takes the first half of that maximum at stage 0 alone, which asks hardly
    anything for a slow late stage when m is near p; the second half lets every stage be the one that
    decides. Exact for equal stages, (m + p - 1)(F + B), and in tests for stages that differ by a fifth.
    """
    stages = len(forward)
    # warmup and ending as the stage before sees them: W + B and E + F.
    warmup = ending = pace = total = 0.0
    for stage in reversed(range(stages)):
        f, b = forward[stage], backward[stage]
        after = stages - stage - 1
        warmup = f + b + max(warmup, after * f)
        ending = f + b + max(ending, after * b)
        pace = max(f + b, pace)
        own = warmup + ending - (f + b) + (microbatches - stages + stage) * pace
        total = max(own, f + b + total)
    return total


def mist(costs: CostTable, devices: int, microbatches: int) -> Tuned:
    """The partition and recompute that minimise `mist_objective` under the memory limit.

    What Mist calls the number of recomputed layers of a stage is here a set of pieces, finer than layers.
    Among equals the partition with the least sum of squared stage work is taken, so that without a limit this
    is the balanced partition. Exact: dynamic programming over (stage, pieces before it), for one limit on the
    slowest stage after the other.

    Raises:
      ValueError: there are more devices than pieces, or nothing fits; then the memory that would do.
    """
    all_runs = _all_runs(costs, devices, microbatches)
    steady, total = microbatches - 1, all_runs.work[0, -1]
    known = _rough(costs, all_runs, microbatches, mist_objective)
    # A stage of time c makes the objective total + (m - 1) c at least.
    longest = (known - total) / steady if steady else np.inf
    added = least_added(all_runs, costs, longest * _ROUNDING)
    return _tuned(costs, _mist_bounds(all_runs.work, added, microbatches), microbatches, mist_objective)


def adapipe(costs: CostTable, devices: int, microbatches: int) -> Tuned:
    """The partition and recompute that minimise `adapipe_objective` under the memory limit.

    Among equals the partition of `mist` is taken. Exact: dynamic programming from the last stage to the
    first, which keeps every (W, E, M, T) that no other equals or undercuts in all four and that may still
    undercut the partition of `mist`.

    Raises:
      ValueError: there are fewer micro-batches than devices, for which AdaPipe has no model; and as `mist`.
    """
    if microbatches < devices:
        raise ValueError(
            f"adapipe on {devices} devices takes at least {devices} micro-batches, not {microbatches}"
        )
    all_runs = _all_runs(costs, devices, microbatches)
    # A stage of time c makes the objective m c at least.
    longest = _rough(costs, all_runs, microbatches, adapipe_objective) / microbatches
    added = least_added(all_runs, costs, longest * _ROUNDING)
    bounds = _mist_bounds(all_runs.work, added, microbatches)
    known = _tuned(costs, bounds, microbatches, adapipe_objective).objective
    forward = sums([piece.F for piece in costs.pieces])
    better = _adapipe_bounds(forward, all_runs.work + added, microbatches, known / _ROUNDING)
    return _tuned(costs, better or bounds, microbatches, adapipe_objective)


def _all_runs(costs: CostTable, devices: int, microbatches: int) -> Runs:
    """All runs of pieces, of which some partition fits the memory limit."""
    count = len(costs.pieces)
    check_counts(count, devices)
    all_runs = runs(costs, devices, microbatches)
    if not np.isfinite(_prefixes(all_or_nothing(all_runs), np.add)[devices, count]):
        raise ValueError(_too_little(costs, all_runs))
    return all_runs


def _rough(costs: CostTable, all_runs: Runs, microbatches: int, objective: Objective) -> float:
    """An objective that is surely within reach: that of stages which recompute all or nothing."""
    bounds = _mist_bounds(all_runs.work, all_or_nothing(all_runs), microbatches)
    return _tuned(costs, bounds, microbatches, objective).objective


def _prefixes(cost: np.ndarray, combine: np.ufunc) -> np.ndarray:
    """[s, j]: least combined cost of the first s stages when they hold the pieces before j.

    cost: [s, i, j] of stage s holding pieces i to j - 1. combine: np.add or np.maximum.
    """
    best = np.full((len(cost) + 1, cost.shape[1]), np.inf)
    best[0, 0] = 0.0
    for stage, stage_cost in enumerate(cost):
        best[stage + 1] = combine(best[stage][:, None], stage_cost).min(axis=0)
    return best


def _mist_bounds(work: np.ndarray, added: np.ndarray, microbatches: int) -> tuple[int, ...]:
    devices, count, steady = len(added), len(work) - 1, microbatches - 1
    time = work + added

    def below(limit):
        """Best bounds with no stage above `limit`, their slowest stage and all time that they add."""
        bounds = _least_added(work, np.where(time <= limit, added, np.inf))
        stages = [(s, *run) for s, run in enumerate(pairwise(bounds))]
        return bounds, max(time[stage] for stage in stages), sum(added[stage] for stage in stages)

    fastest = _prefixes(time, np.maximum)[devices, count]
    best, _, again = below(fastest)
    least = steady * fastest + again
    # A slower pace pays as far as the recompute that it saves makes up for it.
    spare = again - _prefixes(added, np.add)[devices, count]
    limit = fastest + spare / steady if steady else np.inf
    while limit > fastest:
        bounds, pace, again = below(limit)
        if steady * pace + again < least:
            best, least = bounds, steady * pace + again
        if steady * fastest + again >= least:
            break
        limit = np.nextafter(pace, 0.0)
    return best


def _least_added(work: np.ndarray, added: np.ndarray) -> tuple[int, ...]:
    """Bounds of the partition with least recompute and, among equals, least sum of squared work."""
    square = work**2
    again, spread = np.full(len(work), np.inf), np.full(len(work), np.inf)
    again[0] = spread[0] = 0.0
    cuts = []
    for stage_added in added:
        options = again[:, None] + stage_added
        again = options.min(axis=0)
        options = np.where(np.isfinite(options) & (options <= again), spread[:, None] + square, np.inf)
        cuts.append(options.argmin(axis=0))
        spread = options.min(axis=0)
    bounds = [len(work) - 1]
    for cut in reversed(cuts):
        bounds.append(int(cut[bounds[-1]]))
    return tuple(reversed(bounds))


class _Ways(NamedTuple):
    """Ways to put the last pieces on the last devices; all arrays have one entry a way.

    warmup, ending, pace, total: W + B, E + F, M and T of the first of those devices (`adapipe_objective`).
    start: first piece. behind: which way leads on after the first device.
    """

    warmup: np.ndarray
    ending: np.ndarray
    pace: np.ndarray
    total: np.ndarray
    start: np.ndarray
    behind: np.ndarray


def _adapipe_bounds(
    forward: np.ndarray, time: np.ndarray, microbatches: int, limit: float
) -> tuple[int, ...] | None:
    """Bounds of least `adapipe_objective`, or None when none brings it down to `limit`.

    forward: F of run i, j of the pieces, [i, j]. time: its F + B on device s, [s, i, j], infinite where it
    cannot be.
    """
    devices, count, steady = len(time), len(forward) - 1, microbatches - len(time)
    least_time, least_pace = _prefixes(time, np.add), _prefixes(time, np.maximum)
    none = np.zeros(1)
    layers = [_Ways(none, none, none, none, np.array([count]), np.array([-1]))]
    for stage in reversed(range(devices)):
        found, after = [], devices - stage - 1
        for start in np.flatnonzero(np.isfinite(least_time[stage])):
            ways = _prepend(layers[-1], start, time[stage, start], forward[start], after, steady + stage)
            bound = ways.total
            if stage:
                # What is before adds to warm-up and ending, the first device (at most the pace) but once.
                before, pace = least_time[stage, start], np.maximum(ways.pace, least_pace[stage, start])
                ends = np.maximum(before, 2 * before - pace) if steady else before
                bound = np.maximum(bound + before, ways.warmup + ways.ending + ends + steady * pace)
            order = np.argsort(bound, kind="stable")
            order = order[bound[order] <= limit]
            if order.size:
                ways = _Ways(*(array[order] for array in ways))
                kept = _unbeaten(np.stack(ways[:4], axis=1)) if stage else [0]
                found.append(_Ways(*(array[kept] for array in ways)))
        if not found:
            return None
        layers.append(_Ways(*map(np.concatenate, zip(*found))))
    bounds, way = [], 0
    for layer in reversed(layers):
        bounds.append(int(layer.start[way]))
        way = layer.behind[way]
    return tuple(bounds)


def _prepend(ways: _Ways, start: int, time: np.ndarray, forward: np.ndarray, after: int, pairs: int) -> _Ways:
    """The ways with one device more before them, which holds the pieces from `start` up to theirs.

    time, forward: F + B and F of the pieces from `start`, by the piece after. after: devices behind the new
    one. pairs: forwards and backwards that it runs in turn.
    """
    behind = np.flatnonzero(np.isfinite(time[ways.start]))
    step, f = time[ways.start[behind]], forward[ways.start[behind]]
    warmup = step + np.maximum(ways.warmup[behind], after * f)
    ending = step + np.maximum(ways.ending[behind], after * (step - f))
    pace = np.maximum(ways.pace[behind], step)
    total = np.maximum(warmup + ending - step + pairs * pace, step + ways.total[behind])
    return _Ways(warmup, ending, pace, total, np.full(len(behind), start), behind)


def _unbeaten(points: np.ndarray) -> np.ndarray:
    """Indices of the rows that no other row equals or undercuts in all columns, the first of equals kept."""
    left, kept = np.arange(len(points)), []
    while left.size:
        best, left = left[0], left[1:]
        kept.append(best)
        left = left[(points[left] < points[best]).any(axis=1)]
    return np.array(kept)


def _tuned(costs: CostTable, bounds: Sequence[int], microbatches: int, objective: Objective) -> Tuned:
    """The recompute that adds least time to the stages of these bounds, and the objective then."""
    recompute = policies(costs, bounds, microbatches)
    forward = [sum(p.F for p in costs.pieces[i:j]) for i, j in pairwise(bounds)]
    backward = [
        sum(
            p.I + p.W + (p.F if policy == "full" else 0)
            for p, policy in zip(costs.pieces[i:j], recompute[i:j])
        )
        for i, j in pairwise(bounds)
    ]
    return Tuned(bounds, recompute, objective(forward, backward, microbatches))


def _too_little(costs: CostTable, all_runs: Runs) -> str:
    """Why nothing fits: the least memory that would do, and what it is for."""
    stash = all_runs.flight[:, None, None] * all_runs.smallest
    size = np.where(all_runs.possible, all_runs.state + stash, np.inf)
    least = _prefixes(size, np.maximum)[-1, -1]
    bounds = _least_added(all_runs.work, np.where(size <= least, 0.0, np.inf))
    device = max(range(len(size)), key=lambda s: size[s, bounds[s], bounds[s + 1]])
    run = bounds[device], bounds[device + 1]
    first, last = (costs.pieces[i].name for i in (run[0], run[1] - 1))
    needed = f"{math.ceil(least / 1e6) / 1e3:g} GB"  # rounded up, so that it does
    sizes = all_runs.state[run], stash[(device, *run)], costs.memory_limit_bytes
    state, stashes, limit = (f"{size / 1e9:.4g} GB" for size in sizes)
    return (
        f"1F1B needs at least {needed} on device {device}, because its pieces {first} to {last} hold {state} "
        f"of state and, all recomputed, {stashes} of stashes of {all_runs.flight[device]} micro-batches; "
        f"the limit is {limit}"
    )
