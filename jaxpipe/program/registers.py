"""Registers by linear scan: every token gets one where it is made and one where it arrives."""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from jaxpipe.program.instructions import Instruction, Token, token_class
from jaxpipe.program.spec import PieceSpec
from jaxpipe.program.ticks import Timetable


class Allocation(NamedTuple):
    """register: (device, token) -> register number; counts: registers needed by class (largest device)."""

    register: dict[tuple[int, Token], int]
    counts: dict[str, int]


def allocate(
    rows: Sequence[Sequence[Sequence[Instruction]]], timetable: Timetable, pieces: Sequence[PieceSpec]
) -> Allocation:
    """Maps tokens to registers so that no two live ones share.

    Within a tick, sends read first, then instructions run in order, then arrivals are written. An
    instruction reads all its inputs before it writes, so an output may take an input's register.
    """
    born: dict[tuple[int, Token], tuple[int, int]] = {}
    dies: dict[tuple[int, Token], tuple[int, int]] = {}
    last = 1 + max((len(action) for row in rows for action in row), default=0)
    for device, row in enumerate(rows):
        for tick, action in zip(timetable.ticks[device], row):
            for at, x in enumerate(action, start=1):
                for token in x.inputs:
                    dies[device, token] = max(dies.get((device, token), (-1, 0)), (tick, at))
                for token in x.outputs:
                    born[device, token] = (tick, at)
    for m in timetable.messages:
        dies[m.source, m.token] = max(dies.get((m.source, m.token), (-1, 0)), (m.tick, 0))
        born[m.source + m.channel.offset, m.token] = (m.tick, last)
    register, counts = {}, defaultdict(int)
    free, busy = defaultdict(list), defaultdict(list)
    for key in sorted(born, key=lambda k: (born[k], k)):
        device, token = key
        pool = (device, token_class(pieces, token))
        while busy[pool] and busy[pool][0][0] <= born[key]:
            heapq.heappush(free[pool], heapq.heappop(busy[pool])[1])
        if free[pool]:
            number = heapq.heappop(free[pool])
        else:
            number = len(busy[pool])
        register[key] = number
        tick, at = born[key]
        # A token that nobody reads still holds its register while its instruction writes.
        heapq.heappush(busy[pool], (max(dies.get(key, (tick, at + 1)), (tick, at + 1)), number))
        counts[pool[1]] = max(counts[pool[1]], number + 1)
    return Allocation(register, dict(counts))
