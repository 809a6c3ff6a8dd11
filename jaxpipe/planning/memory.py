"""Memory that each device holds over time, from the events of a simulation."""

from collections.abc import Sequence

from jaxpipe.planning.plan import Event, Plan
from jaxpipe.planning.stages import StageCost

Timeline = tuple[tuple[float, float], ...]
"""Steps (time, bytes)."""


def memory_timelines(
    plan: Plan, stages: Sequence[StageCost], events: Sequence[Sequence[Event]]
) -> tuple[Timeline, ...]:
    """For each device the steps (time, bytes) at which the bytes it holds change, from time 0 on.

    A device holds the state of its stages all the time, the stash of a (stage, micro-batch) from the
    start of F to the end of B (or W), and what I leaves for W from the start of I to the end of W.
    Steps follow the order of the actions, so a stash freed by one action is gone before the next
    begins, and several steps may share a time.

    events: for each device its events, in order.
    """
    static = [0.0] * plan.devices
    for stage, device in enumerate(plan.stage_to_device):
        static[device] += stages[stage].state_bytes
    timelines = []
    for size, row in zip(static, events):
        steps = [(0.0, size)]
        for event in row:
            taken, freed = _changes(stages[event.action.stage], event.action.phase)
            for time, change in ((event.start, taken), (event.end, -freed)):
                if change:
                    size += change
                    steps.append((time, size))
        timelines.append(tuple(steps))
    return tuple(timelines)


def _changes(stage: StageCost, phase: str) -> tuple[float, float]:
    """Bytes taken at the start and freed at the end of an action."""
    if phase == "F":
        return stage.stash_bytes, 0
    if phase == "I":
        return stage.grad_stash_bytes, 0
    if phase == "W":
        return 0, stage.stash_bytes + stage.grad_stash_bytes
    return 0, stage.stash_bytes


def peaks_in_flight(events: Sequence[Sequence[Event]]) -> tuple[int, ...]:
    """For each device the most (stage, micro-batch) pairs between the start of F and the end of B or W."""
    peaks = []
    for row in events:
        alive = peak = 0
        for event in row:
            alive += event.action.phase == "F"
            peak = max(peak, alive)
            alive -= event.action.phase in "BW"
        peaks.append(peak)
    return tuple(peaks)
