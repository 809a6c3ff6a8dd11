"""Memory that each device uses, from the order of its actions.

That is the *ideal* model. The *padded* one, what one program for all devices allocates, is in `padded`.
"""

from collections.abc import Sequence

import numpy as np

from jaxpipe.planning.engine import Rows
from jaxpipe.planning.plan import Plan
from jaxpipe.planning.stages import StageCost

MEMORY_MODELS = ("ideal", "padded")
"""Models of memory, by name."""

Timeline = tuple[tuple[float, float], ...]
"""Steps (time, bytes)."""


def memory_timelines(
    plan: Plan, stages: Sequence[StageCost], rows: Rows, start: np.ndarray, end: np.ndarray
) -> tuple[Timeline, ...]:
    """For each device the steps (time, bytes) at which the bytes it uses change, from time 0 on.

    A device uses the state of its stages all the time, the stash of a (stage, micro-batch) from the start
    of F to the end of B or I, but what of it W needs to the end of W, and what I makes for W from the start
    of I to the end of W (see `StageCost`). Steps follow the order of the actions, so what one action frees
    is gone before the next begins, and several steps may share a time.

    start, end: of every action of `rows`.
    """
    static = [0.0] * plan.devices
    for stage, device in enumerate(plan.stage_to_device):
        static[device] += stages[stage].state_bytes
    taken, freed = action_bytes(rows, stages)
    changes = np.stack([taken, -freed], axis=1)
    times = np.stack([start, end], axis=1)
    timelines = []
    for device, size in enumerate(static):
        own = slice(rows.first[device], rows.first[device + 1])
        change, time = changes[own].ravel(), times[own].ravel()
        kept = np.flatnonzero(change)
        sizes = np.cumsum([size, *change[kept]])
        timelines.append(tuple(zip([0.0, *time[kept].tolist()], sizes.tolist())))
    return tuple(timelines)


def action_bytes(rows: Rows, stages: Sequence[StageCost]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that every action takes at its start, and that it frees at its end."""
    held = [(cost.stash_bytes, cost.grad_stash_bytes, cost.made_bytes) for cost in stages]
    return _changes(rows, *np.array(held, np.float64).T)


def peaks_in_flight(rows: Rows) -> tuple[int, ...]:
    """For each device the most (stage, micro-batch) pairs between the start of F and the end of B or W."""
    each = np.ones(1 + rows.stage.max(initial=0), np.int64)
    return tuple(_peaks(rows, *_changes(rows, each, each, 0 * each)).tolist())


def _changes(
    rows: Rows, stash: np.ndarray, gradient: np.ndarray, made: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What every action takes at its start and frees at its end, from what each stage holds (`StageCost`)."""
    none = 0 * stash  # columns in the order of plan.PHASES: F, I, W, B
    taken = np.stack([stash, made, none, none], axis=1)
    freed = np.stack([none, stash + made - gradient, gradient, stash], axis=1)
    return taken[rows.stage, rows.phase], freed[rows.stage, rows.phase]


def _peaks(rows: Rows, taken: np.ndarray, freed: np.ndarray) -> np.ndarray:
    """For each device the most that it ever holds: I takes at its start before it frees at its end."""
    peaks = np.zeros(len(rows.first) - 1, taken.dtype)
    changes = np.stack([taken, -freed], axis=1)
    for device in range(len(peaks)):
        own = slice(rows.first[device], rows.first[device + 1])
        peaks[device] = np.cumsum(changes[own]).max(initial=0)
    return peaks
