"""Instructions placed on ticks, and the messages between them.

A value made in tick t is sent in tick t + 1 at the earliest, arrives at that tick's end and may be
read from tick t + 2 on. A channel carries one message a tick from each device.
"""

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from jaxpipe.planning.plan import Action, Plan
from jaxpipe.program.instructions import Instruction, Rows, Token, token_class
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


class Earliest(NamedTuple):
    """Ticks before which `place` leaves something out; for each device one number an action of its row.

    action: of the action itself. message: of what it sends.
    """

    action: Sequence[Sequence[int]]
    message: Sequence[Sequence[int]]


class Flow(NamedTuple):
    """What each action of each device needs from outside itself, and what it sends where, in order."""

    needs: list[list[list[Token]]]
    sends: list[list[list[tuple[Channel, Token]]]]


def flow(rows: Rows, pieces: Sequence[PieceSpec]) -> Flow:
    """The tokens that go from action to action."""
    needs, readers = [], defaultdict(list)
    for device, row in enumerate(rows):
        needs.append([])
        for action in row:
            made, wanted = set(), set()
            for x in action:
                wanted.update(t for t in x.inputs if t not in made)
                made.update(x.outputs)
            needs[-1].append(sorted(wanted))
            for token in needs[-1][-1]:
                if device not in readers[token]:
                    readers[token].append(device)
    sends = []
    for device, row in enumerate(rows):
        sends.append([])
        for action in row:
            made = [t for x in action for t in x.outputs]
            to = [(t, other) for t in made for other in readers.get(t, ()) if other != device]
            sends[-1].append([(Channel(token_class(pieces, t), other - device), t) for t, other in to])
    return Flow(needs, sends)


def place(plan: Plan, rows: Rows, pieces: Sequence[PieceSpec]) -> Timetable:
    """The timetable in which every action is on the earliest tick possible. Raises as `place_flow`."""
    return place_flow(plan, rows, flow(rows, pieces))


def place_flow(
    plan: Plan,
    rows: Rows,
    moves: Flow,
    earliest: Earliest | None = None,
) -> Timetable:
    """Places every action on the earliest tick that its inputs allow, in the plan's order, one a tick.

    moves: `flow` of the rows.
    earliest: limits to keep, too. Ticks in which they leave nothing to do are taken out at the end.

    Raises:
      ValueError: the schedule deadlocks; says who waits for what.
    """
    usable = [{} for _ in rows]  # token -> first tick at which the device may read it
    waiting: set[tuple[int, Token]] = set()
    last_sent: dict[tuple[int, Channel], int] = defaultdict(int)
    ticks, messages = [[] for _ in rows], []
    ready = deque(range(len(rows)))
    while ready:
        device = ready.popleft()
        known = usable[device]
        while (at := len(ticks[device])) < len(rows[device]):
            needs = moves.needs[device][at]
            missing = next((t for t in needs if t not in known), None)
            if missing is not None:
                waiting.add((device, missing))
                break
            tick = max((known[t] for t in needs), default=0)
            tick = max(
                tick, ticks[device][-1] + 1 if at else 0, earliest.action[device][at] if earliest else 0
            )
            ticks[device].append(tick)
            known.update((t, tick + 1) for x in rows[device][at] for t in x.outputs)
            first = max(tick + 1, earliest.message[device][at] if earliest else 0)
            for channel, token in moves.sends[device][at]:
                sent = last_sent[device, channel] = max(last_sent[device, channel] + 1, first)
                messages.append(Message(sent, device, channel, token))
                target = device + channel.offset
                usable[target][token] = sent + 1
                if (target, token) in waiting:
                    waiting.remove((target, token))
                    ready.append(target)
    if waiting:
        raise ValueError("the schedule deadlocks: " + "; ".join(_waits(plan, rows, moves, usable, ticks)))
    return _without_empty_ticks(ticks, sorted(messages, key=lambda m: m.tick))


def _without_empty_ticks(ticks: list[list[int]], messages: list[Message]) -> Timetable:
    used = sorted({t for row in ticks for t in row} | {m.tick for m in messages})
    number = {tick: i for i, tick in enumerate(used)}
    renamed = [m._replace(tick=number[m.tick]) for m in messages]
    return Timetable([[number[t] for t in row] for row in ticks], renamed, len(used))


def action_of(plan: Plan, instructions: Sequence[Instruction]) -> Action:
    """The action of the plan that the instructions spell out, or the first of them."""
    form, microbatch, *_ = instructions[0]
    return Action(bisect_right(plan.stage_bounds, form.piece) - 1, form.phase, microbatch)


def _waits(plan: Plan, rows, moves: Flow, usable, ticks):
    for device, row in enumerate(rows):
        if (at := len(ticks[device])) < len(row):
            what, piece, value, microbatch = next(
                t for t in moves.needs[device][at] if t not in usable[device]
            )
            yield (
                f"device {device} waits in {action_of(plan, row[at])} for the {what} {value}".rstrip()
                + f" of piece {plan.pieces[piece]!r}, micro-batch {microbatch}"
            )
