"""How long a program takes when every permute is a rendezvous of the devices that it joins.

In tick t device d starts when its tick before is done. A permute of the tick joins source and target:

    start[d, t]  = done[d, t - 1]
    arrive(m)    = max(start[source, t], start[target, t]) + time of the message
    done[d, t]   = max(start[d, t] + duration[d, t], arrive(m) for every m that d sends or receives)

Permutes are static: a device that has nothing to send meets its partner all the same. Which pairs meet in
a tick is the tick's pattern. (Virtual CPU devices wait for everyone at each permute instead.)
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpipe.planning.plan import Action, Event
from jaxpipe.program.patterns import Senders
from jaxpipe.program.ticks import Channel, Timetable

Work = Sequence[Sequence[tuple[Action, float]]]
"""Of one device: for each tick in which it computes, its actions in order and the time each takes."""


class Ties(NamedTuple):
    """The permutes of one pattern as arrays: sending device, receiving device, time of the message."""

    sources: np.ndarray
    targets: np.ndarray
    times: np.ndarray


def ties(senders: Senders, channels: Sequence[Channel], times: Sequence[float]) -> Ties:
    """The permutes of a pattern; `times` of a message on each channel."""
    pairs = sorted(senders)
    sources = [d for _, d in pairs]
    targets = [d + channels[c].offset for c, d in pairs]
    return Ties(np.array(sources, int), np.array(targets, int), np.array([times[c] for c, _ in pairs], float))


def finish_times(durations: np.ndarray, patterns: Sequence[Ties], pattern: Sequence[int]) -> np.ndarray:
    """done [P, T] by the recurrence.

    durations [P, T]: time of each device's actions in each tick, 0 where it has none.
    pattern [T]: of each tick, an index into `patterns`.
    """
    done = np.zeros(durations.shape)
    start = np.zeros(len(durations))
    for tick, which in enumerate(pattern):
        sources, targets, times = patterns[which]
        end = start + durations[:, tick]
        arrive = np.maximum(start[sources], start[targets]) + times
        np.maximum.at(end, sources, arrive)
        np.maximum.at(end, targets, arrive)
        done[:, tick] = start = end
    return done


def durations_by_tick(timetable: Timetable, work: Sequence[Work]) -> np.ndarray:
    """[P, T]: the time of what each device does in each tick."""
    table = np.zeros((len(work), timetable.length))
    for device, (ticks, row) in enumerate(zip(timetable.ticks, work, strict=True)):
        table[device, ticks] = [sum(time for _, time in actions) for actions in row]
    return table


def makespan(done: np.ndarray) -> float:
    """When the last device is done."""
    return float(done[:, -1].max()) if done.size else 0.0


def tick_events(
    timetable: Timetable, work: Sequence[Work], done: np.ndarray
) -> tuple[tuple[Event, ...], ...]:
    """The actions of each device in time, from the `finish_times` of the timetable."""
    rows = []
    for device, (ticks, row) in enumerate(zip(timetable.ticks, work, strict=True)):
        events = []
        for tick, actions in zip(ticks, row, strict=True):
            now = float(done[device, tick - 1]) if tick else 0.0
            for action, time in actions:
                events.append(Event(device, action, now, now + time))
                now += time
        rows.append(tuple(events))
    return tuple(rows)
