"""Which permutes the ticks perform.

Permutes are static: a *pattern* says which devices send on which channel, and the step is compiled with a
few of them. A device that is in the tick's pattern meets its partner there even when it has nothing to send.
"""

import heapq
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


def commonest(sent: Sequence[Senders], count: int) -> list[Senders]:
    """At most `count` patterns: the exact ones that most ticks need, and one that holds all others."""
    exact = [senders for senders, _ in Counter(sent).most_common()]
    if len(exact) <= count:
        return exact
    rest = frozenset().union(*exact[count - 1 :])
    return list(dict.fromkeys([*exact[: count - 1], rest]))


def merged(sent: Sequence[Senders], count: int, time: Callable[[Sequence[Senders]], float]) -> list[Senders]:
    """At most `count` patterns that hold what every tick sends: the exact ones, merged pair by pair.

    Of the pairs whose union adds the fewest permutes to all ticks, the one with the least time is merged.

    time: how long the program takes with some patterns.
    """
    bit = {pair: 1 << i for i, pair in enumerate(sorted(frozenset().union(*sent)))}
    ticks = Counter(sum(bit[pair] for pair in senders) for senders in sent)  # bits are quick to unite

    def senders(bits: int) -> Senders:
        return frozenset(pair for pair, one in bit.items() if bits & one)

    def union_time(pair: tuple[int, int]) -> float:
        return time([senders(bits) for bits in _with_union(ticks, *pair)])

    while len(ticks) > count:
        pairs = heapq.nsmallest(TRIED, combinations(ticks, 2), key=lambda pair: _added(ticks, *pair))
        ticks = _with_union(ticks, *min(pairs, key=union_time))
    return [senders(bits) for bits in ticks]


def _added(ticks: Counter, a: int, b: int) -> int:
    """Permutes that ticks of either pattern perform for nothing when both use the union."""
    return ticks[a] * (b & ~a).bit_count() + ticks[b] * (a & ~b).bit_count()


def _with_union(ticks: Counter, a: int, b: int) -> Counter:
    rest = Counter({p: n for p, n in ticks.items() if p not in (a, b)})
    rest[a | b] += ticks[a] + ticks[b]
    return rest
