"""Memory that each device holds, from the order of its actions.

Two models. *Ideal*: every device holds what it uses. *Padded*: what one program for all devices (SPMD)
allocates: every device has the same parameter slots and registers, as many as the fullest needs.
"""

from collections.abc import Sequence

import numpy as np

from jaxpipe.costs.table import CostTable
from jaxpipe.planning.engine import Rows
from jaxpipe.planning.plan import PHASES, Plan
from jaxpipe.planning.stages import StageCost, input_bytes

MEMORY_MODELS = ("ideal", "padded")
"""Models of memory, by name."""

Timeline = tuple[tuple[float, float], ...]
"""Steps (time, bytes)."""

_F, _I, _W, _B = range(len(PHASES))


def memory_timelines(
    plan: Plan, stages: Sequence[StageCost], rows: Rows, start: np.ndarray, end: np.ndarray
) -> tuple[Timeline, ...]:
    """For each device the steps (time, bytes) at which the bytes it uses change, from time 0 on.

    A device uses the state of its stages all the time, the stash of a (stage, micro-batch) from the
    start of F to the end of B (or W), and what I leaves for W from the start of I to the end of W.
    Steps follow the order of the actions, so a stash freed by one action is gone before the next
    begins, and several steps may share a time.

    start, end: of every action of `rows`.
    """
    static = [0.0] * plan.devices
    for stage, device in enumerate(plan.stage_to_device):
        static[device] += stages[stage].state_bytes
    stash, gradient = (
        np.array([getattr(cost, name) for cost in stages]) for name in ("stash_bytes", "grad_stash_bytes")
    )
    taken, freed = _changes(rows, stash, gradient)
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


def peaks_in_flight(rows: Rows) -> tuple[int, ...]:
    """For each device the most (stage, micro-batch) pairs between the start of F and the end of B or W."""
    each = np.ones(1 + rows.stage.max(initial=0), np.int64)
    return tuple(_peaks(rows, *_changes(rows, each, 0 * each)).tolist())


def padded_bytes(plan: Plan, costs: CostTable, rows: Rows) -> float:
    """Bytes that every device allocates when all devices run one program.

    Parameters: each device has as many slots of a kind of piece as the device with most pieces of it,
    and a slot has the bytes of the kind's largest piece, times the table's `state_factor`.

    Registers: each device has as many of a class as are ever alive at once on any device. The stash
    of the pieces of one kind is a class, and so is what their I leaves for W, by recompute policy;
    a register has the bytes of the class's largest piece. Inputs that pieces with recompute "full"
    stash are messages: those of equal bytes are one class, whatever the kind.

    The executor (program/registers.py, runtime/memory.py) also rounds numbers of registers up to
    buckets, and has registers for messages, buffers for those on their way, and workspace; these
    are left out.
    """
    state: dict[str, list[float]] = {}  # kind -> bytes of each of its pieces
    stash: dict[tuple, list[tuple[int, float]]] = {}  # class -> (stage, bytes) of each piece
    gradient: dict[tuple, list[tuple[int, float]]] = {}
    slots: dict[str, np.ndarray] = {}
    for stage, device in enumerate(plan.stage_to_device):
        for i in plan.stage_pieces(stage):
            piece, policy = costs.pieces[i], plan.recompute[i]
            state.setdefault(piece.kind, []).append(piece.param_bytes)
            slots.setdefault(piece.kind, np.zeros(plan.devices, np.int64))[device] += 1
            if policy == "full":
                size = input_bytes(costs, i)
                stash.setdefault(("input", size), []).append((stage, size))
            else:
                stash.setdefault((piece.kind, policy), []).append((stage, piece.stash_bytes))
            gradient.setdefault((piece.kind, policy), []).append((stage, piece.grad_stash_bytes))
    total = costs.state_factor * sum(slots[kind].max() * max(sizes) for kind, sizes in state.items())
    none = np.zeros(plan.stages, np.int64)
    for classes, between in ((stash, False), (gradient, True)):
        for members in classes.values():
            size = max(size for _, size in members)
            if not size:
                continue
            number = np.bincount([stage for stage, _ in members], minlength=plan.stages)
            changes = _changes(rows, none, number) if between else _changes(rows, number, none)
            total += size * _peaks(rows, *changes).max()
    return float(total)


def _changes(rows: Rows, stash: np.ndarray, gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What every action takes at its start and frees at its end, from both stashes of each stage."""
    none = 0 * stash
    taken = np.stack([stash, gradient, none, none], axis=1)
    freed = np.stack([none, none, stash + gradient, stash], axis=1)
    return taken[rows.stage, rows.phase], freed[rows.stage, rows.phase]


def _peaks(rows: Rows, taken: np.ndarray, freed: np.ndarray) -> np.ndarray:
    """For each device the most that it ever holds; an action takes or frees, so this is after one of them."""
    peaks = np.zeros(len(rows.first) - 1, taken.dtype)
    for device in range(len(peaks)):
        own = slice(rows.first[device], rows.first[device + 1])
        peaks[device] = np.cumsum(taken[own] - freed[own]).max(initial=0)
    return peaks
