"""How long a plan takes and how much memory it holds, from the dependencies between its actions.

Every device runs its row in order, each action as soon as what it reads is there:

    F of stage s        F of stage s - 1
    I or B of stage s   F of stage s, and I or B of stage s + 1
    W of stage s        I of stage s

(all of the same micro-batch). What is read from another device takes a message of `link.time(bytes)`;
messages do not share bandwidth, and between stages of one device there are none. There are two ways of
sending:

    buffered     the message starts when it is made, and the sender goes on at once
    rendezvous   the message of action a to action r starts when a has ended and so has the action before r
                 in the row of r; the action after a waits for its end, as r does

Rendezvous sends and receives are posted together at the boundary between two actions, so that two devices
may each send to the other there.
"""

from typing import NamedTuple

import numpy as np

from jaxpipe.costs.table import CostTable
from jaxpipe.planning.engine import NEVER, Links, Rows, blocked, connect, encode, run
from jaxpipe.planning.memory import MEMORY_MODELS, Timeline, memory_timelines, peaks_in_flight
from jaxpipe.planning.padded import padded_bytes
from jaxpipe.planning.plan import Event, Plan, internal_idle
from jaxpipe.planning.stages import CORE, StageCost, stage_costs


class Terms(NamedTuple):
    """Where the time of one device goes: makespan = compute + communication + bubble - overlap, exactly.

    This is the performance model of OctoPipe (arXiv 2509.23722, named AdaPtis there), T_d = C_d + bubble -
    overlap, whose C_d is compute and communication together; which time is whose is defined here.

    compute: the sum of the device's actions.
    communication: the sum of the times of all messages that it receives.
    overlap: what of these times costs it nothing: a message costs the part of its time in which the device
      has ended the action before the receiving one, and so does nothing else but wait for it.
    bubble: time in which the device neither computes nor waits for a message on its way: what it must
      receive next has not been made (or, with rendezvous sends, has arrived while what it sends has not),
      or it has ended its row.
    """

    compute: float
    communication: float
    overlap: float
    bubble: float


class Simulation(NamedTuple):
    """What a plan does in time. Tuples have one entry a device; times in the unit of the cost table.

    events: for each device its events, in order.
    makespan: end of the last event.
    busy: time in which the device computes.
    bubble_fraction: 1 - sum(busy) / (devices * makespan); 0 when the makespan is 0.
    internal_bubble: the part of bubble_fraction that is neither before a device's first start nor after its
      last end: sum(internal_idle) / (devices * makespan).
    internal_idle: idle time between the first start and the last end of the device.
    peak_in_flight: most (stage, micro-batch) pairs at once between the start of F and the end of B or
      W. With one stage a device these are micro-batches.
    memory: steps (time, bytes) at which the bytes used change; they begin at time 0. They are those of the
      ideal model in either case: with padded memory they stay below a constant allocation.
    peak_bytes: the most bytes used at once (ideal), or the bytes allocated, equal on all devices (padded).
    terms: compute, communication, overlap and bubble.
    """

    events: tuple[tuple[Event, ...], ...]
    makespan: float
    busy: tuple[float, ...]
    bubble_fraction: float
    internal_bubble: float
    internal_idle: tuple[float, ...]
    peak_in_flight: tuple[int, ...]
    memory: tuple[Timeline, ...]
    peak_bytes: tuple[float, ...]
    terms: tuple[Terms, ...]


def simulate(
    plan: Plan, costs: CostTable, sends: str = "buffered", memory_model: str = "ideal"
) -> Simulation:
    """Runs the schedule of a plan that passed `plan.check`.

    sends: "buffered" or "rendezvous", as described above.
    memory_model: "ideal", each device holds what it uses; "padded", all allocate the same, as
      `padded.padded_bytes` says. Times do not depend on it.

    Raises:
      ValueError: when the table is not about the pieces of the plan, for an unknown way of sending or
        model of memory, when an action stands twice or on another device than the forward it belongs
        to, and when the schedule deadlocks; then for every blocked device the action it stops at and
        the one that this waits for.
    """
    if memory_model not in MEMORY_MODELS:
        raise ValueError(f"unknown memory model {memory_model!r}; known: {', '.join(MEMORY_MODELS)}")
    stages = stage_costs(plan, costs)
    rows = encode(plan.schedule)
    links = connect(rows, plan.stages, plan.microbatches, sends)
    durations, messages = engine_costs(stages, costs)
    start, end = run(rows, links, durations, messages)
    if NEVER in end:
        waits = "; ".join(blocked(rows, links, end))
        raise ValueError(f"the schedule of plan {plan.name!r} deadlocks: {waits}")
    makespan = float(end.max(initial=0.0))
    terms = _terms(rows, links, messages, start, end)
    busy = tuple(term.compute for term in terms)
    events = _events(plan, rows, start, end)
    inside = internal_idle(events, busy)
    memory = memory_timelines(plan, stages, rows, start, end)
    if memory_model == "padded":
        peak_bytes = (padded_bytes(plan, costs, rows),) * plan.devices
    else:
        peak_bytes = tuple(max(size for _, size in row) for row in memory)
    return Simulation(
        events=events,
        makespan=makespan,
        busy=busy,
        bubble_fraction=1.0 - sum(busy) / (plan.devices * makespan) if makespan else 0.0,
        internal_bubble=sum(inside) / (plan.devices * makespan) if makespan else 0.0,
        internal_idle=inside,
        peak_in_flight=peaks_in_flight(rows),
        memory=memory,
        peak_bytes=peak_bytes,
        terms=terms,
    )


def lower_bound(costs: CostTable, devices: int, microbatches: int) -> float:
    """Time that no plan can beat: microbatches * max(total / devices, largest piece that stays on a device).

    Attention cores without parameters do not: their micro-batches may run on several devices.
    """
    total = sum(piece.total for piece in costs.pieces)
    fixed = [p.total for p in costs.pieces if p.kind != CORE or p.param_bytes]
    return microbatches * max(total / devices, max(fixed, default=0.0))


def engine_costs(stages: tuple[StageCost, ...], costs: CostTable) -> tuple[np.ndarray, np.ndarray]:
    """Durations and message times of the stages as `engine.run` takes them."""
    durations = np.array([(stage.F, stage.I, stage.W, stage.B) for stage in stages], np.float64)
    messages = [costs.link.time(stage.output_bytes) for stage in stages[:-1]]
    return durations, np.array([*messages, 0.0])


def _events(plan: Plan, rows: Rows, start: np.ndarray, end: np.ndarray) -> tuple[tuple[Event, ...], ...]:
    events = []
    for device, row in enumerate(plan.schedule):
        own = slice(rows.first[device], rows.first[device + 1])
        times = zip(row, start[own].tolist(), end[own].tolist())
        events.append(tuple(Event(device, action, begin, stop) for action, begin, stop in times))
    return tuple(events)


def _terms(
    rows: Rows, links: Links, messages: np.ndarray, start: np.ndarray, end: np.ndarray
) -> tuple[Terms, ...]:
    """The terms of every device."""
    filled = np.diff(rows.first) > 0
    before = np.zeros_like(end)  # end of the action before each one
    before[1:] = end[:-1]
    before[rows.first[:-1][filled]] = 0.0
    travels = links.source_hop < len(messages) - 1
    time = np.where(travels, messages[links.source_hop], 0.0)
    sent = np.where(travels, end[links.source], 0.0)
    if len(links.release):
        sent = np.maximum(sent, before)
    # Of a message the part after `before` is waited for; the rest of the gap before an action is bubble.
    waited = np.where(travels, np.maximum(sent + time - np.maximum(sent, before), 0.0), 0.0)
    device = rows.device()
    spent = (end - start, time, time - waited, start - before - waited)
    compute, communication, overlap, bubble = (np.bincount(device, t, len(filled)) for t in spent)
    last = np.zeros_like(bubble)
    last[filled] = end[rows.first[1:][filled] - 1]
    bubble += end.max(initial=0.0) - last
    table = np.stack([compute, communication, overlap, bubble], axis=1)
    return tuple(Terms(*row) for row in table.tolist())
