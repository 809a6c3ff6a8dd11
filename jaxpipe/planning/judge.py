"""Judges a schedule that someone else wrote: is it right, and how long does it take.

Nothing but the schedule need be known: a stage is where its actions stand, and each stage must run each
micro-batch, by F and B or by F, I and W. A bidirectional pipeline (DualPipe, arXiv 2412.19437) holds every
stage twice and numbers the copies on: where the stages part into chains of equal length that share no
micro-batch, each chain is a copy of the model and runs the micro-batches of its own.

The simulator times plans, which cannot say that a pair overlaps: both its actions start once the inputs of
both are there, take as long as the two together, and have their results at the end. So sheets are timed
here, cell by cell, by the simulator's rules of what waits for what.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from jaxpipe.costs.table import CostTable, Link, PieceCost
from jaxpipe.planning import rendezvous
from jaxpipe.planning.faults import Fault, Place, Shape, missing_action, shape_of, wrong_cell
from jaxpipe.planning.interchange import Cell, Sheet
from jaxpipe.planning.partition import balanced, check_counts
from jaxpipe.planning.plan import Action, Event, internal_idle
from jaxpipe.planning.stages import StageCost, costs_of_stages


class Unit(NamedTuple):
    """Times that are the same for every stage; comm is the one-way latency between devices."""

    F: float = 1.0
    I: float = 1.0
    W: float = 1.0
    comm: float = 0.0


UNIT = Unit()
"""All times 1, no communication."""


class Verdict(NamedTuple):
    """What a schedule comes to. Tuples have one entry a device; times in the unit of the costs.

    error: what is wrong with the first wrong action, in one line; None when the schedule is valid. If
      not, the fields after `places` are None.
    places: the cells to look at, the first wrong one first.
    chains: copies of the model, 1 but for bidirectional pipelines.
    stage_to_device: the device that runs the first micro-batch of each stage. floating: stages that run
      on several.
    busy, bubble_fraction, internal_bubble, internal_idle, peak_in_flight, events: as in
      `simulator.Simulation`; the events of a pair have one time.
    stage_bounds: stage s of a chain holds the pieces stage_bounds[s]:stage_bounds[s + 1] of the cost table;
      None also where there is no table.
    """

    error: str | None
    places: tuple[Place, ...] = ()
    microbatches: int | None = None
    chains: int | None = None
    stage_to_device: tuple[int, ...] | None = None
    floating: tuple[int, ...] | None = None
    makespan: float | None = None
    busy: tuple[float, ...] | None = None
    bubble_fraction: float | None = None
    internal_bubble: float | None = None
    internal_idle: tuple[float, ...] | None = None
    peak_in_flight: tuple[int, ...] | None = None
    events: tuple[tuple[Event, ...], ...] | None = None
    stage_bounds: tuple[int, ...] | None = None

    @property
    def valid(self) -> bool:
        """Whether the schedule is complete, in order and free of deadlocks."""
        return self.error is None


def judge(
    sheet: Sheet, costs: CostTable | Unit = UNIT, stage_to_device: Sequence[int] | None = None
) -> Verdict:
    """Looks for the first wrong action, then runs the schedule.

    Sends and receives, if there are any, must be complete, in order and free of deadlocks; they take no
    time of their own, since the costs tell what messages take.

    costs: a table's pieces are spread over the stages of a chain so that the longest stage is shortest.
    stage_to_device: where each stage must run; by default it may run anywhere, but each micro-batch on one
      device.

    Raises:
      ValueError: the placement names a device without a row, or the table has fewer pieces than stages.
    """
    for stage, device in enumerate(stage_to_device or ()):
        if not 0 <= device < len(sheet.rows):
            raise ValueError(
                f"stage {stage} is placed on device {device}; the schedule has rows for devices 0 to "
                f"{len(sheet.rows) - 1}"
            )
    if fault := wrong_cell(sheet, stage_to_device):
        return Verdict(*fault)
    shape = shape_of(sheet)
    if fault := missing_action(sheet, shape):
        return Verdict(*fault)
    table = _unit_table(costs, shape.length) if isinstance(costs, Unit) else costs
    bounds = _spread(table, shape.length)
    stages = costs_of_stages(table, bounds, ("none",) * len(table.pieces))
    events, fault = _run(sheet, shape, stages, table.link)
    if not fault and rendezvous.has_messages(sheet):
        fault = rendezvous.wrong_message(sheet, shape) or rendezvous.deadlock(sheet)
    if fault:
        return Verdict(*fault)
    return _verdict(shape, events)._replace(stage_bounds=bounds if table is costs else None)


def _verdict(shape: Shape, events: tuple[tuple[Event, ...], ...]) -> Verdict:
    devices: list[list[int]] = [[] for _ in range(shape.stages)]
    for (stage, _), device in sorted(shape.homes.items()):
        if device not in devices[stage]:
            devices[stage].append(device)
    makespan = max(row[-1].end for row in events if row)
    busy = tuple(_busy(row) for row in events)
    inside = internal_idle(events, busy)
    return Verdict(
        error=None,
        microbatches=shape.microbatches,
        chains=shape.stages // shape.length,
        stage_to_device=tuple(homes[0] for homes in devices),
        floating=tuple(stage for stage, homes in enumerate(devices) if len(homes) > 1),
        makespan=makespan,
        busy=busy,
        bubble_fraction=1.0 - sum(busy) / (len(events) * makespan) if makespan else 0.0,
        internal_bubble=sum(inside) / (len(events) * makespan) if makespan else 0.0,
        internal_idle=inside,
        peak_in_flight=tuple(map(_peak_in_flight, events)),
        events=events,
    )


def _busy(row: Sequence[Event]) -> float:
    """Time in which a device computes; a pair has one time."""
    return sum(end - start for start, end in sorted({(e.start, e.end) for e in row}))


def _peak_in_flight(row: Sequence[Event]) -> int:
    """The most (stage, micro-batch) pairs of a device between the start of F and the end of B or W."""
    alive = peak = 0
    for event in row:
        alive += event.action.phase == "F"
        peak = max(peak, alive)
        alive -= event.action.phase in "BW"
    return peak


def _unit_table(costs: Unit, length: int) -> CostTable:
    """A table with one piece for each stage of a chain."""
    pieces = tuple(PieceCost(f"stage {s}", "stage", costs.F, costs.I, costs.W) for s in range(length))
    return CostTable("unit", pieces, Link(costs.comm))


def _spread(costs: CostTable, length: int) -> tuple[int, ...]:
    """Bounds of the pieces on the stages of a chain."""
    check_counts(len(costs.pieces), length, where="stages of the schedule")
    return balanced([piece.total for piece in costs.pieces], length)


_Value = tuple[bool, int, int]
"""What actions wait for, the output or the input gradient of a stage: forward, stage, micro-batch."""


def _run(
    sheet: Sheet, shape: Shape, stages: Sequence[StageCost], link: Link
) -> tuple[tuple[tuple[Event, ...], ...], Fault | None]:
    """The events of every device, up to a deadlock if there is one.

    stages: of one chain. Every device works off its row, each cell as soon as its inputs are there.
    """
    rows = [[cell for cell in row if cell.actions] for row in sheet.rows]
    events: list[list[Event]] = [[] for _ in rows]
    done, now = [0] * len(rows), [0.0] * len(rows)
    made: dict[_Value, float] = {}
    waiting: dict[_Value, list[int]] = {}
    ready = deque(range(len(rows)))
    while ready:
        device = ready.popleft()
        while done[device] < len(rows[device]):
            actions = rows[device][done[device]].actions
            inputs = _inputs(actions, shape.length)
            missing = next((value for _, value in inputs if value not in made), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(device)
                break
            there = (made[v] + _travel(a, v, device, shape, stages, link) for a, v in inputs)
            start = max((now[device], *there))
            end = start + sum(getattr(stages[a.stage % shape.length], a.phase) for a in actions)
            now[device] = end
            done[device] += 1
            for action in actions:
                events[device].append(Event(device, action, start, end))
                if action.phase != "W":
                    value = (action.phase == "F", action.stage, action.microbatch)
                    made[value] = end
                    ready.extend(waiting.pop(value, ()))
    stops = {device: rows[device][done[device]] for value in waiting for device in waiting[value]}
    waits = {device: _maker(value, shape, rows) for value in waiting for device in waiting[value]}
    return tuple(map(tuple, events)), rendezvous.circle(stops, waits)


def _inputs(actions: Sequence[Action], length: int) -> list[tuple[Action, _Value]]:
    """What a cell waits for, with the action that needs it: all inputs but those it makes itself."""
    inputs, own = [], set()
    for action in actions:
        stage, phase, microbatch = action
        if phase == "F":
            values = [(True, stage - 1, microbatch)] if stage % length else []
        elif phase == "W":
            values = [(False, stage, microbatch)]
        else:
            values = [(True, stage, microbatch)]
            values += [(False, stage + 1, microbatch)] if (stage + 1) % length else []
        inputs += [(action, value) for value in values if value not in own]
        own.add((phase == "F", stage, microbatch))
    return inputs


def _travel(
    action: Action, value: _Value, device: int, shape: Shape, stages: Sequence[StageCost], link: Link
) -> float:
    """Time that a value takes from the device that makes it."""
    forward, stage, microbatch = value
    if stage == action.stage or shape.homes[stage, microbatch] == device:
        return 0.0
    return link.time(stages[(stage if forward else stage - 1) % shape.length].output_bytes)


def _maker(value: _Value, shape: Shape, rows: Sequence[Sequence[Cell]]) -> tuple[str, int]:
    """The action that makes a value, and its device."""
    forward, stage, microbatch = value
    device = shape.homes[stage, microbatch]
    there = {action for cell in rows[device] for action in cell.actions}
    options = [Action(stage, phase, microbatch) for phase in ("F" if forward else "IB")]
    return next(str(action) for action in options if action in there), device
