"""Spreading pieces over the stages of a placement so that devices have equal loads."""

from collections.abc import Iterator, Sequence

import numpy as np
from numba import njit

STAGES_A_DEVICE = (1, 2, 3, 4, 6, 8)
"""Numbers of stages a device that a search begins with."""


def placements(devices: int, pieces: int) -> Iterator[tuple[int, ...]]:
    """The device of each stage, in loops (0 1 0 1) and waves (0 1 1 0), at most `pieces` stages."""
    for count in STAGES_A_DEVICE:
        if count * devices <= pieces:
            yield tuple(range(devices)) * count
            if count > 1:
                turns = (range(devices), range(devices - 1, -1, -1))
                yield tuple(device for turn in range(count) for device in turns[turn % 2])


def spread(
    weights: Sequence[float], homes: Sequence[int], keep: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bounds and devices of stages whose devices have loads as equal as a local search makes them.

    The search begins with stages of equal weight and moves one piece at a time from a stage of the fullest
    device to another stage, shifting the bounds between them. Stages that are left without a piece are
    dropped, and neighbours on one device become one stage.

    keep: every stage keeps a piece.

    Returns:
      (bounds, homes) as in `candidate.Candidate`.
    """
    weight_N = np.asarray(weights, np.float64)
    homes_S = np.asarray(homes, np.int64)
    count, stages = len(weight_N), len(homes_S)
    total = np.concatenate([[0.0], np.cumsum(weight_N)])
    targets = total[-1] * np.arange(stages + 1) / stages
    bounds = np.searchsorted(total, targets, side="left")
    bounds[0], bounds[-1] = 0, count
    if keep:  # at least one piece each, from the front and from the back
        steps = np.arange(stages + 1)
        bounds = np.clip(np.maximum.accumulate(bounds - steps) + steps, steps, count - stages + steps)
    _balance(weight_N, homes_S, bounds, 1 if keep else 0)
    return merged(bounds.tolist(), homes_S.tolist())


def merged(bounds: Sequence[int], homes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The stages without empty ones, neighbours on one device as one."""
    new_bounds, new_homes = [0], []
    for stop, home in zip(bounds[1:], homes):
        if stop == new_bounds[-1]:
            continue
        if new_homes and new_homes[-1] == home:
            new_bounds[-1] = stop
        else:
            new_bounds.append(stop)
            new_homes.append(home)
    return tuple(new_bounds), tuple(new_homes)


@njit(cache=True, nogil=True)
def _balance(weight_N, homes_S, bounds, least):
    """Moves pieces, changing `bounds` in place, until no move makes the sum of squared loads smaller.

    A stage keeps at least `least` pieces.
    """
    stages = len(homes_S)
    load_D = np.zeros(homes_S.max() + 1)
    for stage in range(stages):
        load_D[homes_S[stage]] += weight_N[bounds[stage] : bounds[stage + 1]].sum()
    while True:
        best, best_from, best_to = 1e-9 * (load_D**2).sum(), -1, -1
        fullest = load_D.argmax()
        for giver in range(stages):
            if homes_S[giver] != fullest or bounds[giver + 1] - bounds[giver] <= least:
                continue
            for step in (-1, 1):
                gain, taker = 0.0, giver
                change_D = np.zeros(len(load_D))
                while 0 <= taker + step < stages:
                    # The piece at the edge of each stage on the way goes over to the next one.
                    piece = bounds[taker + 1] - 1 if step > 0 else bounds[taker]
                    if bounds[taker + 1] == bounds[taker]:
                        break
                    change_D[homes_S[taker]] -= weight_N[piece]
                    taker += step
                    change_D[homes_S[taker]] += weight_N[piece]
                    gain = (load_D**2).sum() - ((load_D + change_D) ** 2).sum()
                    if gain > best:
                        best, best_from, best_to = gain, giver, taker
        if best_from < 0:
            return
        step = 1 if best_to > best_from else -1
        for stage in range(best_from, best_to, step):
            piece = bounds[stage + 1] - 1 if step > 0 else bounds[stage]
            load_D[homes_S[stage]] -= weight_N[piece]
            load_D[homes_S[stage + step]] += weight_N[piece]
            if step > 0:
                bounds[stage + 1] -= 1
            else:
                bounds[stage] += 1
