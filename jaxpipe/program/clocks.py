"""Timetables: the earliest ticks, and the ticks that coarse clocks show at dependency-level times.

On the earliest ticks devices agree on an order, not on lengths: a short action may have to wait for a
neighbour's long one. A clock of some beat puts what happens at one time on one tick.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from jaxpipe.planning.plan import Plan
from jaxpipe.program.instructions import Rows
from jaxpipe.program.recurrence import Work
from jaxpipe.program.ticks import Earliest, Flow, Timetable, place_flow

Spans = list[list[tuple[float, float]]]
"""(start, end) of what each device does in each tick in which it computes."""

BEATS = (0.4, 0.6, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05)
"""Beats that are tried, over the mean time of a tick where ticks are the earliest."""


def timetables(
    plan: Plan, rows: Rows, moves: Flow, work: Sequence[Work], message_times: Mapping[str, float]
) -> Iterator[Timetable]:
    """The earliest ticks, then those by clocks where lengths differ.

    An action stands on the beat in which it starts, has its middle, or ends. Where it starts may be long
    before its end, so there its messages wait for the beat in which it ends. Which clock is best depends on
    the lengths; each of BEATS was best for some plan.

    message_times: of a message, by register class. Raises as `place_flow`.
    """
    soonest = place_flow(plan, rows, moves)
    yield soonest
    spans = dependency_spans(rows, soonest, moves, work, message_times)
    lengths = [end - start for row in spans for start, end in row if end > start]
    if not lengths or math.isclose(min(lengths), max(lengths)):
        return
    pace = max(end for row in spans for _, end in row) / soonest.length
    slack, free = 1e-9 * max(lengths), [[0] * len(row) for row in rows]
    for share in BEATS:

        def ticks(time: Callable[[float, float], float], beat=share * pace) -> list[list[int]]:
            return [[math.floor((time(*span) + slack) / beat) for span in row] for row in spans]

        starts, ends = ticks(lambda start, _: start), ticks(lambda _, end: end)
        middles, lasts = ticks(lambda *span: sum(span) / 2), ticks(lambda _, end: end - 3 * slack)
        for earliest in (Earliest(starts, ends), Earliest(middles, free), Earliest(lasts, free)):
            yield place_flow(plan, rows, moves, earliest)


def dependency_spans(
    rows: Rows, timetable: Timetable, moves: Flow, work: Sequence[Work], message_times: Mapping[str, float]
) -> Spans:
    """When everything happens if a device waits for nothing but what it reads.

    timetable: any of these rows; it tells an order in which what is read is made before.
    """
    order = sorted((tick, d, i) for d, ticks in enumerate(timetable.ticks) for i, tick in enumerate(ticks))
    spans: Spans = [[] for _ in rows]
    arrival = [0.0] * len(moves.routes)
    for _, d, i in order:
        start = max((arrival[m] for m in moves.needs[d][i]), default=0.0)
        start = max(start, spans[d][-1][1] if i else 0.0)
        end = start + sum(time for _, time in work[d][i])
        spans[d].append((start, end))
        for m in moves.sends[d][i]:
            arrival[m] = end + message_times[moves.routes[m][1].register_class]
    return spans
