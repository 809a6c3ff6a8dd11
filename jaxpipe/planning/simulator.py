"""How long a plan takes and how much memory it holds, from the dependencies between its actions.

Every device runs its row in order, each action as soon as what it reads is there:

    F of stage s        F of stage s - 1
    I or B of stage s   F of stage s, and I or B of stage s + 1
    W of stage s        I of stage s

(all of the same micro-batch). What is read from another device arrives `link.time(bytes)` after it
was made; the sender goes on at once and messages do not share bandwidth.
"""

from collections import deque
from typing import NamedTuple

from jaxpipe.costs.table import CostTable, Link
from jaxpipe.planning.memory import Timeline, memory_timelines, peaks_in_flight
from jaxpipe.planning.plan import Action, Event, Plan
from jaxpipe.planning.stages import StageCost, stage_costs


class Simulation(NamedTuple):
    """What a plan does in time. Tuples have one entry a device; times in the unit of the cost table.

    events: for each device its events, in order.
    makespan: end of the last event.
    busy: time in which the device computes.
    bubble_fraction: 1 - sum(busy) / (devices * makespan); 0 when the makespan is 0.
    internal_bubble: idle time between the first start and the last end of the device.
    peak_in_flight: most (stage, micro-batch) pairs at once between the start of F and the end of B or
      W. With one stage a device these are micro-batches.
    memory: steps (time, bytes) at which the bytes held change; they begin at time 0.
    peak_bytes: the most bytes held at once.
    """

    events: tuple[tuple[Event, ...], ...]
    makespan: float
    busy: tuple[float, ...]
    bubble_fraction: float
    internal_bubble: tuple[float, ...]
    peak_in_flight: tuple[int, ...]
    memory: tuple[Timeline, ...]
    peak_bytes: tuple[float, ...]


def simulate(plan: Plan, costs: CostTable) -> Simulation:
    """Runs the schedule of a plan that passed `plan.check`.

    Raises:
      ValueError: when the table is not about the pieces of the plan, when an action stands twice or
        on another device than the forward it belongs to, and when the schedule deadlocks; then for
        every blocked device the action it stops at and the one that this waits for.
    """
    stages = stage_costs(plan, costs)
    events = _run(plan, stages, costs.link)
    makespan = max((row[-1].end for row in events if row), default=0.0)
    busy = tuple(sum(e.end - e.start for e in row) for row in events)
    span = [row[-1].end - row[0].start if row else 0.0 for row in events]
    memory = memory_timelines(plan, stages, events)
    return Simulation(
        events=events,
        makespan=makespan,
        busy=busy,
        bubble_fraction=1.0 - sum(busy) / (plan.devices * makespan) if makespan else 0.0,
        internal_bubble=tuple(whole - used for whole, used in zip(span, busy)),
        peak_in_flight=peaks_in_flight(events),
        memory=memory,
        peak_bytes=tuple(max(size for _, size in row) for row in memory),
    )


def lower_bound(costs: CostTable, devices: int, microbatches: int) -> float:
    """Time that no plan without recompute can beat: microbatches * max(total / devices, largest piece)."""
    times = [piece.total for piece in costs.pieces]
    return microbatches * max(sum(times) / devices, max(times))


# A value that actions wait for: the output (forward) or the input gradient (not forward) of a stage.
_Value = tuple[bool, int, int]  # forward, stage, micro-batch


def _run(plan: Plan, stages: tuple[StageCost, ...], link: Link) -> tuple[tuple[Event, ...], ...]:
    """Events of every device. Each device waits for at most one value, which wakes it when it is made."""
    events: list[list[Event]] = [[] for _ in range(plan.devices)]
    made: dict[_Value, tuple[float, int]] = {}  # when, and on which device
    waiting: dict[_Value, list[int]] = {}
    ready = deque(range(plan.devices))
    while ready:
        device = ready.popleft()
        row, done = plan.schedule[device], events[device]
        now = done[-1].end if done else 0.0
        while len(done) < len(row):
            action = row[len(done)]
            start = now
            for value in _needs(action, plan.stages):
                if value not in made:
                    waiting.setdefault(value, []).append(device)
                    break
                time, source = made[value]
                if source != device:
                    time += link.time(_message_bytes(value, action, source, device, stages))
                start = max(start, time)
            else:
                now = start + getattr(stages[action.stage], action.phase)
                done.append(Event(device, action, start, now))
                if action.phase != "W":
                    value = (action.phase == "F", action.stage, action.microbatch)
                    if value in made:
                        raise ValueError(f"device {device} runs {action} after {_name(plan, value)} has run")
                    made[value] = (now, device)
                    ready.extend(waiting.pop(value, ()))
                continue
            break
    if waiting:
        raise ValueError(_deadlock(plan, events, waiting))
    return tuple(map(tuple, events))


def _needs(action: Action, stages: int) -> list[_Value]:
    stage, phase, microbatch = action
    if phase == "F":
        return [(True, stage - 1, microbatch)] if stage else []
    if phase == "W":
        return [(False, stage, microbatch)]
    needs = [(True, stage, microbatch)]
    return needs + [(False, stage + 1, microbatch)] if stage + 1 < stages else needs


def _message_bytes(
    value: _Value, action: Action, source: int, device: int, stages: tuple[StageCost, ...]
) -> float:
    """Bytes of a value that crosses devices. What one stage keeps for its own backward never does."""
    forward, stage, microbatch = value
    if stage == action.stage:
        made = Action(stage, "F" if forward else "I", microbatch)
        raise ValueError(f"{action} stands on device {device} but reads what {made} left on device {source}")
    return stages[stage if forward else stage - 1].output_bytes


def _name(plan: Plan, value: _Value) -> str:
    """The scheduled action that makes `value`, with its device."""
    forward, stage, microbatch = value
    phases = "F" if forward else "IB"
    for device, row in enumerate(plan.schedule):
        for phase in phases:
            if (action := Action(stage, phase, microbatch)) in row:
                return f"{action} of device {device}"
    return f"{Action(stage, phases[-1], microbatch)}, which no device runs"


def _deadlock(plan: Plan, events: list[list[Event]], waiting: dict[_Value, list[int]]) -> str:
    blocked = sorted((device, value) for value, devices in waiting.items() for device in devices)
    waits = []
    for device, value in blocked:
        action = plan.schedule[device][len(events[device])]
        waits.append(f"device {device} stops at {action}, which waits for {_name(plan, value)}")
    return f"the schedule of plan {plan.name!r} deadlocks: " + "; ".join(waits)
