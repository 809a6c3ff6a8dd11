"""The simulator's inner loop: schedules as flat arrays, run by compiled code.

Actions are numbered device by device in the order of the rows. `encode` makes arrays of a schedule,
`connect` finds what every action waits for, `run` finds when it starts and ends. Who simulates one
schedule with many costs needs the first two once.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from jaxpipe.planning.plan import PHASES, Action, Schedule

SENDS = ("buffered", "rendezvous")
"""Ways of sending a message; see `simulator`."""

NONE, NO_OWN, NO_NEIGHBOUR = -1, -2, -3
"""In place of the number of an action: no action; what the stage itself (or its neighbour) should have
made is made by nobody."""

NEVER = -np.inf
"""End of an action that has not run."""

_F, _W = PHASES.index("F"), PHASES.index("W")
_PHASE_NUMBER = {phase: number for number, phase in enumerate(PHASES)}


class Rows(NamedTuple):
    """A schedule as arrays over its A actions, D devices.

    first: [D + 1]; device d runs the actions first[d] to first[d + 1] - 1, in this order.
    stage, phase, microbatch: [A]; phases as numbers in PHASES.
    """

    first: np.ndarray
    stage: np.ndarray
    phase: np.ndarray
    microbatch: np.ndarray

    def device(self) -> np.ndarray:
        """The device of every action: [A]."""
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))

    def action(self, number: int) -> Action:
        """The action of a number."""
        stage, phase, microbatch = (int(array[number]) for array in self[1:])
        return Action(stage, PHASES[phase], microbatch)

    def where(self, number: int) -> int:
        """The device that runs the action of a number."""
        return int(np.searchsorted(self.first, number, side="right")) - 1


class Links(NamedTuple):
    """What every action waits for, besides the end of the action before it: arrays [A].

    source: the action that makes what it reads, or NONE, NO_OWN, NO_NEIGHBOUR.
    source_hop: the boundary of stages that the message from `source` crosses; the last stage where
      there is none (both on one device).
    release: where sends are rendezvous, the action before the receiver of what the action before this
      one sends, in the receiver's row; NONE where nothing is sent or the receiver is the first.
    release_hop: the boundary that this message crosses, likewise.

    `release` and `release_hop` are empty where sends are buffered.
    """

    source: np.ndarray
    source_hop: np.ndarray
    release: np.ndarray
    release_hop: np.ndarray


def encode(schedule: Schedule) -> Rows:
    """The arrays of a schedule. Raises KeyError for a phase that is none."""
    actions = [action for row in schedule for action in row]
    count = len(actions)
    return Rows(
        first=np.cumsum([0, *map(len, schedule)]),
        stage=np.fromiter((a[0] for a in actions), np.int32, count),
        phase=np.fromiter((_PHASE_NUMBER[a[1]] for a in actions), np.int32, count),
        microbatch=np.fromiter((a[2] for a in actions), np.int32, count),
    )


def connect(rows: Rows, stages: int, microbatches: int, sends: str = "buffered") -> Links:
    """Finds what every action waits for.

    Raises:
      ValueError: for an unknown way of sending, an action of a stage or micro-batch that is not there,
        two actions that make the same value, and an action that stands on another device than the one
        of its stage and micro-batch before it.
    """
    if sends not in SENDS:
        raise ValueError(f"unknown way of sending {sends!r}; known: {', '.join(SENDS)}")
    for what, array, count in (
        ("stages", rows.stage, stages),
        ("micro-batches", rows.microbatch, microbatches),
    ):
        wrong = np.flatnonzero((array < 0) | (array >= count))
        if wrong.size:
            at = wrong[0]
            raise ValueError(
                f"action {rows.action(at)} on device {rows.where(at)}: {what} go from 0 to {count - 1}"
            )
    at, twin, own, *links = _connect(*rows, stages, microbatches, sends == "rendezvous")
    if twin != NONE:
        raise ValueError(
            f"device {rows.where(at)} runs {rows.action(at)} after {describe(rows, twin)} has run"
        )
    if own != NONE:
        # A B that left what a W reads stood in for its I.
        left = rows.action(own)._replace(phase="F" if rows.phase[own] == _F else "I")
        raise ValueError(
            f"{rows.action(at)} stands on device {rows.where(at)} "
            f"but reads what {left} left on device {rows.where(own)}"
        )
    return Links(*links)


def run(
    rows: Rows, links: Links, durations: np.ndarray, messages: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of every action, [A] each. What a deadlock keeps from running has NEVER as its end.

    Args:
      durations: [stages, 4], time of each phase in the order of PHASES.
      messages: [stages], time of a message over the boundary between a stage and the next one, both
        ways; the last entry must be 0.
    """
    return _run(rows.first, rows.stage, rows.phase, *links, durations, messages)


def describe(rows: Rows, number: int) -> str:
    """An action in words, with its device."""
    return f"{rows.action(number)} of device {rows.where(number)}"


def blocked(rows: Rows, links: Links, end: np.ndarray) -> list[str]:
    """For each device that did not finish its row, the action it stops at and what this waits for."""
    lines = []
    for device in range(len(rows.first) - 1):
        own = slice(rows.first[device], rows.first[device + 1])
        stopped = np.flatnonzero(end[own] == NEVER)
        if stopped.size:
            at = int(own.start + stopped[0])
            awaited = _awaited(rows, links, end, at)
            lines.append(f"device {device} stops at {rows.action(at)}, which waits for {awaited}")
    return lines


def _awaited(rows: Rows, links: Links, end: np.ndarray, at: int) -> str:
    """What a blocked action waits for."""
    source, action = int(links.source[at]), rows.action(at)
    if source <= NO_OWN:
        if action.phase == "F":
            missing = action._replace(stage=action.stage - 1)
        elif action.phase == "W":
            missing = action._replace(phase="B")
        elif source == NO_OWN:
            missing = action._replace(phase="F")
        else:
            missing = Action(action.stage + 1, "B", action.microbatch)
        return f"{missing}, which no device runs"
    if source != NONE and end[source] == NEVER:
        return describe(rows, source)
    before = int(links.release[at])
    return (
        f"{rows.action(at - 1)} to be received by device {rows.where(before)}, "
        f"as {rows.action(before + 1)} after {rows.action(before)}"
    )


@njit(cache=True)
def _connect(first, stage, phase, microbatch, stages, microbatches, rendezvous):
    """The work of `connect`: (a wrong action, its twin, what it needs from another device, *Links).

    The first three are NONE where all is well.
    """
    count, nothing = len(stage), stages - 1
    source, source_hop = np.full(count, NONE, np.int32), np.full(count, nothing, np.int32)
    released = count if rendezvous else 0
    release, release_hop = np.full(released, NONE, np.int32), np.full(released, nothing, np.int32)
    device = np.empty(count, np.int32)
    # The action that makes a value: output (0) or input gradient (1) by stage and micro-batch.
    maker = np.full((2, stages, microbatches), NONE, np.int32)
    for d in range(len(first) - 1):
        for a in range(first[d], first[d + 1]):
            device[a] = d
            if phase[a] != _W:
                side = 0 if phase[a] == _F else 1
                twin = maker[side, stage[a], microbatch[a]]
                if twin != NONE:
                    return a, twin, NONE, source, source_hop, release, release_hop
                maker[side, stage[a], microbatch[a]] = a
    for a in range(count):
        s, m = stage[a], microbatch[a]
        neighbour = s - 1 if phase[a] == _F else s + 1
        if phase[a] != _F:
            own = maker[1 if phase[a] == _W else 0, s, m]
            if own != NONE and device[own] != device[a]:
                return a, NONE, own, source, source_hop, release, release_hop
            # What stands before the action in its row needs no link.
            if own == NONE or own > a:
                source[a] = NO_OWN if own == NONE else own
                continue
            if phase[a] == _W:
                continue
        if 0 <= neighbour < stages:
            side = 0 if phase[a] == _F else 1
            made = maker[side, neighbour, m]
            if made == NONE:
                source[a] = NO_NEIGHBOUR
                continue
            source[a] = made
            if device[made] != device[a]:
                hop = min(s, neighbour)
                source_hop[a] = hop
                # The message also holds up what follows its sender.
                if rendezvous and made + 1 < first[device[made] + 1]:
                    release_hop[made + 1] = hop
                    if a > first[device[a]]:
                        release[made + 1] = a - 1
    return NONE, NONE, NONE, source, source_hop, release, release_hop


@njit(cache=True)
def _run(first, stage, phase, source, source_hop, release, release_hop, durations, messages):
    """The work of `run`: a work-list of devices; one that is blocked waits for the end of one action."""
    count, devices, rendezvous = len(stage), len(first) - 1, len(release) > 0
    start, end = np.empty(count), np.full(count, NEVER)
    position = first[:-1].copy()
    waiter = np.full(count, NONE, np.int32)  # the last device that began to wait for an action
    other = np.full(devices, NONE, np.int32)  # the one that waited for the same action before
    ready = np.arange(devices)
    left = devices
    while left:
        left -= 1
        device = ready[left]
        a, stop = position[device], first[device + 1]
        now = end[a - 1] if a > first[device] else 0.0
        while a < stop:
            begin, need = now, source[a]
            if need != NONE:
                if need < NONE:
                    break
                made = end[need]
                if made == NEVER:
                    other[device], waiter[need] = waiter[need], device
                    break
                if rendezvous:
                    made = max(made, now)
                begin = max(begin, made + messages[source_hop[a]])
            if rendezvous:
                received = now
                need = release[a]
                if need != NONE:
                    if end[need] == NEVER:
                        other[device], waiter[need] = waiter[need], device
                        break
                    received = max(received, end[need])
                begin = max(begin, received + messages[release_hop[a]])
            start[a] = begin
            now = begin + durations[stage[a], phase[a]]
            end[a] = now
            waiting = waiter[a]
            while waiting != NONE:
                ready[left] = waiting
                left += 1
                waiting = other[waiting]
            a += 1
        position[device] = a
    return start, end
