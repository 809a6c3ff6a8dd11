"""Which permutes the ticks perform.

Permutes are static: a *pattern* says which devices send on which channel, and the step is compiled with a
few of them. A device that is in the tick's pattern meets its partner there even when it has nothing to send.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations

from jaxpipe.program.ticks import Channel, Timetable

Pattern = tuple[tuple[int, ...], ...]
"""For each channel, the devices that send in a tick."""

Senders = frozenset[tuple[int, int]]
"""The same as a set of (channel, device); channels by number."""

TRIED = 4
"""Of the merges that add the fewest permutes, how many are tried on the clock."""


def full_pattern(channels: Sequence[Channel], devices: int) -> Pattern:
    """Every channel sends from every device that has a neighbour there."""
    return tuple(tuple(d for d in range(devices) if 0 <= d + c.offset < devices) for c in channels)


def to_pattern(senders: Senders, channels: int) -> Pattern:
    """The senders channel by channel; there are `channels` of them."""
    return tuple(tuple(sorted(d for c, d in senders if c == channel)) for channel in range(channels))


def to_senders(pattern: Pattern) -> Senders:
    """The inverse of `to_pattern`."""
    return frozenset((c, d) for c, devices in enumerate(pattern) for d in devices)


def sent_by_tick(timetable: Timetable, channels: Sequence[Channel]) -> list[Senders]:
    """What is sent in each tick."""
    number = {channel: i for i, channel in enumerate(channels)}
    sent = [set() for _ in range(timetable.length)]
    for m in timetable.messages:
        sent[m.tick].add((number[m.channel], m.source))
    return list(map(frozenset, sent))


def assign(sent: Sequence[Senders], patterns: Sequence[Senders]) -> list[int]:
    """For each tick the smallest of the patterns that holds what it sends."""
    chosen = {
        need: min((len(p), i) for i, p in enumerate(patterns) if need <= p)[1] for need in dict.fromkeys(sent)
    }
    return [chosen[need] for need in sent]


def merged(sent: Sequence[Senders], count: int, time: Callable[[Sequence[Senders]], float]) -> list[Senders]:
    """At most `count` patterns that hold what every tick sends: the exact ones, merged pair by pair.

    Of the pairs whose union adds the fewest permutes to all ticks, the one with the least time is merged.

    time: how long the program takes with some patterns.
    """
    ticks = Counter(sent)
    while len(ticks) > count:
        pairs = sorted(combinations(ticks, 2), key=lambda pair: _added(ticks, *pair))[:TRIED]
        unions = [_with_union(ticks, *pair) for pair in pairs]
        ticks = min(unions, key=lambda union: time(list(union))) if len(unions) > 1 else unions[0]
    return list(ticks)


def _added(ticks: Counter, a: Senders, b: Senders) -> tuple[int, int]:
    """Permutes that ticks of either pattern perform for nothing when both use the union."""
    return ticks[a] * len(b - a) + ticks[b] * len(a - b), len(a | b)


def _with_union(ticks: Counter, a: Senders, b: Senders) -> Counter:
    rest = Counter({p: n for p, n in ticks.items() if p not in (a, b)})
    rest[a | b] += ticks[a] + ticks[b]
    return rest
