"""How a plan's actions are spread over ticks, and which permutes the ticks perform.

Several ways are tried, and the one that takes least time by the recurrence is kept.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np

from jaxpipe.costs.table import CostTable, Link
from jaxpipe.planning.plan import Event, Plan
from jaxpipe.planning.schedules import fuse_backward
from jaxpipe.planning.stages import stage_costs
from jaxpipe.program.clocks import dependency_spans, timetables
from jaxpipe.program.instructions import Instruction, Rows, expand
from jaxpipe.program.patterns import (
    Senders,
    assign,
    commonest,
    full_pattern,
    merged,
    sent_by_tick,
    to_senders,
)
from jaxpipe.program.recurrence import Work, durations_by_tick, finish_times, makespan, tick_events, ties
from jaxpipe.program.registers import Allocation, allocate
from jaxpipe.program.spec import PieceSpec
from jaxpipe.program.ticks import Channel, Timetable, action_of, flow

UNIT_TIMES = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}
"""Times of actions where no cost table is given; messages then take none."""

TOLERANCE = 1e-9
"""Relative difference of times that are the same up to rounding."""


class Arrangement(NamedTuple):
    """A plan on ticks.

    rows, work: for each device, the instructions of each tick in which it computes, and their actions.
    timetable: those ticks, and the messages.
    channels: all that messages travel on.
    patterns: what each pattern sends. pattern: of each tick, an index into `patterns`.
    done [P, T]: when each device is done with each tick, in the unit of the cost table.
    """

    rows: Rows
    work: list[Work]
    timetable: Timetable
    channels: tuple[Channel, ...]
    patterns: tuple[Senders, ...]
    pattern: tuple[int, ...]
    done: np.ndarray

    @property
    def makespan(self) -> float:
        """Time of the whole program."""
        return makespan(self.done)

    def events(self) -> tuple[tuple[Event, ...], ...]:
        """The actions of each device in time."""
        return tick_events(self.timetable, self.work, self.done)


Arranged = tuple[Arrangement, Allocation]


def arrange(
    plan: Plan, pieces: Sequence[PieceSpec], costs: CostTable | None = None, patterns: int = 1
) -> Arranged:
    """The arrangement that takes least time among those tried, and its registers.

    Tried are: the plan's actions one a tick; neighbouring I and W of one micro-batch fused; W in one tick
    with the F after it. Each of them on the timetables of `clocks`, with the full pattern and, where more
    are allowed, with the commonest of the exact ones; of the two most promising, merged ones. The first that
    takes no longer than the dependencies do is kept; of equals the one on fewest ticks. What needs more
    registers of some class than the plan's actions on their earliest ticks is left out.

    costs: times of actions and messages; UNIT_TIMES when None.
    patterns: the most sets of permutes that the step may be compiled with.

    Raises:
      ValueError: the schedule deadlocks, the cost table is about other pieces, or `patterns` is below 1.
    """
    return arrangements(plan, pieces, costs, (patterns,))[patterns]


def arrangements(
    plan: Plan, pieces: Sequence[PieceSpec], costs: CostTable | None, counts: Sequence[int]
) -> dict[int, Arranged]:
    """What `arrange` finds, for several numbers of patterns at once; more are never slower than fewer."""
    if min(counts) < 1:
        raise ValueError(f"patterns is {min(counts)}; expected at least 1")
    message_times = _message_times(pieces, costs)
    chosen, limits, clocks = None, {}, []

    def consider(found: Arrangement) -> None:
        nonlocal chosen, limits
        if chosen and not _better(found, chosen[0]):
            return
        allocation = allocate(found.rows, found.timetable, pieces)
        # The first that is considered has the plan's own actions on their earliest ticks.
        limits = limits or allocation.counts
        if all(count <= limits.get(name, 0) for name, count in allocation.counts.items()):
            chosen = found, allocation

    ideal = None  # of the plan's own rows; the other variants only make somebody wait
    for rows in _row_variants(plan, pieces):
        moves, work = flow(rows, pieces), _work(plan, rows, costs)
        for timetable in timetables(plan, rows, moves, work, message_times):
            if ideal is None:
                spans = dependency_spans(rows, timetable, moves, work, message_times)
                ideal = max((end for row in spans for _, end in row), default=0.0)
            clocks.append(_Clock(rows, timetable, work, message_times))
            consider(clocks[-1].full(plan.devices))
            if chosen[0].makespan <= ideal * (1 + TOLERANCE):
                return dict.fromkeys(counts, chosen)
    result = {}
    for count in sorted(counts):
        if count > 1:
            _with_patterns(clocks, count, lambda: chosen[0].makespan, consider)
        result[count] = chosen
    return result


def _with_patterns(
    clocks: Sequence["_Clock"],
    count: int,
    best: Callable[[], float],
    consider: Callable[[Arrangement], None],
) -> None:
    """Considers the timetables with `count` patterns. best(): least time so far."""
    few = [clock.arrangement(commonest(clock.sent, count)) for clock in clocks]
    for found in few:
        consider(found)
    # Merging is slow. What no wait at all would not make the best is left out.
    bounds = [clock.bound for clock in clocks]
    spans = [found.makespan for found in few]
    for number in dict.fromkeys((spans.index(min(spans)), bounds.index(min(bounds)))):
        if bounds[number] < best() * (1 - TOLERANCE):
            consider(clocks[number].merged(count))


def _better(found: Arrangement, best: Arrangement) -> bool:
    """Whether it takes less time, or as much (up to rounding) on fewer ticks."""
    if math.isclose(found.makespan, best.makespan, rel_tol=TOLERANCE):
        return found.timetable.length < best.timetable.length
    return found.makespan < best.makespan


class _Clock:
    """The recurrence of one timetable under any patterns."""

    def __init__(self, rows: Rows, timetable: Timetable, work: Sequence[Work], times: Mapping[str, float]):
        self.rows, self.timetable, self.work = rows, timetable, work
        self.channels = tuple(sorted({m.channel for m in timetable.messages}))
        self.times = [times[c.register_class] for c in self.channels]
        self.durations = durations_by_tick(timetable, work)

    @cached_property
    def sent(self) -> list[Senders]:
        """What is sent in each tick."""
        return sent_by_tick(self.timetable, self.channels)

    @cached_property
    def exact(self) -> list[Senders]:
        """Patterns without which nobody waits for nothing."""
        return list(dict.fromkeys(self.sent))

    @cached_property
    def bound(self) -> float:
        """Time with the exact patterns."""
        return self.makespan(self.exact)

    def makespan(self, patterns: Sequence[Senders]) -> float:
        return makespan(self._done(patterns))

    def full(self, devices: int) -> Arrangement:
        return self.arrangement([to_senders(full_pattern(self.channels, devices))])

    def merged(self, count: int) -> Arrangement:
        return self.arrangement(merged(self.sent, count, self.makespan))

    def _assigned(self, patterns: Sequence[Senders]) -> list[int]:
        return assign(self.sent, patterns) if len(patterns) > 1 else [0] * self.timetable.length

    def _done(self, patterns: Sequence[Senders]) -> np.ndarray:
        tied = [ties(p, self.channels, self.times) for p in patterns]
        return finish_times(self.durations, tied, self._assigned(patterns))

    def arrangement(self, patterns: Sequence[Senders]) -> Arrangement:
        pattern, done = tuple(self._assigned(patterns)), self._done(patterns)
        return Arrangement(
            self.rows, self.work, self.timetable, self.channels, tuple(patterns), pattern, done
        )


def _row_variants(plan: Plan, pieces: Sequence[PieceSpec]) -> Iterator[Rows]:
    """Ways to put the plan's actions in ticks; the plan's own, one action a tick, is first."""
    rows = expand(plan, pieces)
    yield rows
    fused = replace(plan, schedule=fuse_backward(plan.schedule))
    if fused != plan:
        yield expand(fused, pieces)
    if (joined := [_weights_with_forwards(row) for row in rows]) != rows:
        yield joined


def _weights_with_forwards(row: Sequence[Sequence[Instruction]]) -> list[list[Instruction]]:
    """The row with every W in one tick with the F after it, if that comes next.

    Nobody waits for what a W makes, so this holds up nothing but the F.
    """
    result: list[list[Instruction]] = []
    for instructions in row:
        phase = instructions[0].form.phase
        if phase == "F" and result and {x.form.phase for x in result[-1]} == {"W"}:
            result[-1] = [*result[-1], *instructions]
        else:
            result.append(list(instructions))
    return result


def _work(plan: Plan, rows: Rows, costs: CostTable | None) -> list[Work]:
    """The actions in each tick of each device, with their times."""
    stages = stage_costs(plan, costs) if costs else None
    result = []
    for row in rows:
        result.append([])
        for instructions in row:
            actions = [action for action, _ in groupby(action_of(plan, [x]) for x in instructions)]
            times = [getattr(stages[a.stage], a.phase) if stages else UNIT_TIMES[a.phase] for a in actions]
            result[-1].append(list(zip(actions, times)))
    return result


def _message_times(pieces: Sequence[PieceSpec], costs: CostTable | None) -> dict[str, float]:
    """Time of a message by register class."""
    link = costs.link if costs else Link()
    names = {name for spec in pieces for name in spec.classes.values()}
    sizes = {name: size for spec in pieces for name, size in spec.bytes.items()}
    return {name: link.time(sizes.get(name, 0)) for name in names}
