"""Instructions placed on ticks, and the messages between them.

A value made in tick t is sent in tick t + 1 at the earliest, arrives at that tick's end and may be
read from tick t + 2 on. A channel carries one message a tick from each device.
"""

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from jaxpipe.planning.plan import Action, Plan
from jaxpipe.program.instructions import Instruction, Token, token_class
from jaxpipe.program.spec import PieceSpec


class Channel(NamedTuple):
    """One permute: registers of one class move from every device d to device d + offset."""

    register_class: str
    offset: int


class Message(NamedTuple):
    """A token that travels in a tick."""

    tick: int
    source: int
    channel: Channel
    token: Token


class Timetable(NamedTuple):
    """ticks: for each device, the tick of each of its actions; messages in order of ticks."""

    ticks: list[list[int]]
    messages: list[Message]
    length: int


def place(
    plan: Plan, rows: Sequence[Sequence[Sequence[Instruction]]], pieces: Sequence[PieceSpec]
) -> Timetable:
    """Places every action on the earliest tick that its inputs allow, in the plan's order, one a tick.

    Raises:
      ValueError: the schedule deadlocks; says who waits for what.
    """
    needs, readers = _needs_and_readers(rows)
    usable = [{} for _ in rows]  # token -> first tick at which the device may read it
    queues: dict[tuple[int, Channel], deque] = defaultdict(deque)
    position, ticks, messages = [0] * len(rows), [[] for _ in rows], []
    tick = 0
    while any(position[d] < len(rows[d]) for d in range(len(rows))):
        moved = False
        for (source, channel), queue in queues.items():
            if queue and queue[0][0] <= tick:
                _, token = queue.popleft()
                messages.append(Message(tick, source, channel, token))
                usable[source + channel.offset][token] = tick + 1
                moved = True
        waiting = any(queues.values())
        for device, row in enumerate(rows):
            at = position[device]
            if at == len(row) or any(usable[device].get(t, tick + 1) > tick for t in needs[device][at]):
                continue
            moved = True
            ticks[device].append(tick)
            position[device] += 1
            for token in (t for x in row[at] for t in x.outputs):
                usable[device][token] = tick + 1
                for other in readers.get(token, ()):
                    if other != device:
                        channel = Channel(token_class(pieces, token), other - device)
                        queues[device, channel].append((tick + 1, token))
        # An idle tick is fine while something is on its way; otherwise nobody will ever move again.
        if not moved and not waiting and not any(_coming(needs, usable, position, rows, tick)):
            raise ValueError(
                "the schedule deadlocks: " + "; ".join(_waits(plan, rows, needs, usable, position))
            )
        tick += 1
    return Timetable(ticks, messages, tick)


def _needs_and_readers(rows) -> tuple[list[list[set[Token]]], dict[Token, list[int]]]:
    """Tokens that each action needs from outside itself, and the devices that read each token."""
    needs, readers = [], defaultdict(list)
    for device, row in enumerate(rows):
        needs.append([])
        for action in row:
            made, wanted = set(), set()
            for x in action:
                wanted.update(t for t in x.inputs if t not in made)
                made.update(x.outputs)
            needs[-1].append(wanted)
            for token in sorted(wanted):
                if device not in readers[token]:
                    readers[token].append(device)
    return needs, readers


def _coming(needs, usable, position, rows, tick):
    """For each unfinished device: whether all it waits for is already under way."""
    for device, row in enumerate(rows):
        if position[device] < len(row):
            yield all(t in usable[device] for t in needs[device][position[device]])


def _waits(plan: Plan, rows, needs, usable, position):
    for device, row in enumerate(rows):
        if position[device] < len(row):
            missing = sorted(t for t in needs[device][position[device]] if t not in usable[device])
            what, piece, value, microbatch = missing[0]
            form, own_microbatch, *_ = row[position[device]][0]
            action = Action(bisect_right(plan.stage_bounds, form.piece) - 1, form.phase, own_microbatch)
            yield (
                f"device {device} waits in {action} for the {what} {value}".rstrip()
                + f" of piece {plan.pieces[piece]!r}, micro-batch {microbatch}"
            )
