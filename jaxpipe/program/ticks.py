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
    """The messages between devices, by number.

    routes: (source, channel, token) of each; those of one source in the order in which it makes them.
    needs, sends: for each device and action, the messages that it must have and has not had before, and those
      that it makes.
    stuck: for each device, index of an action -> a token that it reads before it is made; it never runs.
    """

    routes: list[tuple[int, Channel, Token]]
    needs: list[list[list[int]]]
    sends: list[list[list[int]]]
    stuck: list[dict[int, Token]]


def flow(rows: Rows, pieces: Sequence[PieceSpec]) -> Flow:
    """What goes from which action to which."""
    maker = {t: (d, i) for d, row in enumerate(rows) for i, a in enumerate(row) for x in a for t in x.outputs}
    wanted, readers, stuck = [], defaultdict(list), [{} for _ in rows]
    for device, row in enumerate(rows):
        wanted.append([])
        had: set[Token] = set()
        for i, action in enumerate(row):
            made, new = set(), set()
            for x in action:
                new.update(t for t in x.inputs if t not in made and t not in had)
                made.update(x.outputs)
            for token in sorted(new):
                source, at = maker.get(token, (device, i))
                if source != device:
                    readers[token].append(device)
                elif at >= i:
                    stuck[device].setdefault(i, token)
            had |= new | made
            wanted[-1].append(sorted(t for t in new if t in readers and device in readers[t]))
    routes, sends, number = [], [], {}
    for device, row in enumerate(rows):
        sends.append([])
        for action in row:
            sends[-1].append([])
            for token in (t for x in action for t in x.outputs):
                for reader in readers.get(token, ()):
                    number[token, reader] = len(routes)
                    sends[-1][-1].append(len(routes))
                    routes.append((device, Channel(token_class(pieces, token), reader - device), token))
    needs = [[[number[t, d] for t in tokens] for tokens in row] for d, row in enumerate(wanted)]
    return Flow(routes, needs, sends, stuck)


def place(plan: Plan, rows: Rows, pieces: Sequence[PieceSpec]) -> Timetable:
    """The timetable in which every action is on the earliest tick possible. Raises as `place_flow`."""
    return place_flow(plan, rows, flow(rows, pieces))


def place_flow(plan: Plan, rows: Rows, moves: Flow, earliest: Earliest | None = None) -> Timetable:
    """Places every action on the earliest tick that its inputs allow, in the plan's order, one a tick.

    moves: `flow` of the rows.
    earliest: limits to keep, too. Ticks in which they leave nothing to do are taken out at the end.

    Raises:
      ValueError: the schedule deadlocks; says who waits for what.
    """
    sent: list[int | None] = [None] * len(moves.routes)
    waiting: dict[int, int] = {}  # message -> the device that can do nothing before it
    last_sent: dict[tuple[int, Channel], int] = defaultdict(int)
    ticks: list[list[int]] = [[] for _ in rows]
    ready = deque(range(len(rows)))
    while ready:
        device = ready.popleft()
        own, needs, sends, stuck = (
            ticks[device],
            moves.needs[device],
            moves.sends[device],
            moves.stuck[device],
        )
        while (at := len(own)) < len(needs) and at not in stuck:
            tick = own[-1] + 1 if at else 0
            if earliest:
                tick = max(tick, earliest.action[device][at])
            missing = None
            for message in needs[at]:
                when = sent[message]
                if when is None:
                    missing = message
                    break
                tick = max(tick, when + 1)
            if missing is not None:
                waiting[missing] = device
                break
            own.append(tick)
            first = max(tick + 1, earliest.message[device][at]) if earliest else tick + 1
            for message in sends[at]:
                queue = moves.routes[message][:2]
                sent[message] = last_sent[queue] = max(last_sent[queue] + 1, first)
                if message in waiting:
                    ready.append(waiting.pop(message))
    if any(len(own) < len(row) for own, row in zip(ticks, rows)):
        raise ValueError("the schedule deadlocks: " + "; ".join(_waits(plan, rows, moves, sent, ticks)))
    return _without_empty_ticks(ticks, sent, moves)


def _without_empty_ticks(ticks: list[list[int]], sent: list[int], moves: Flow) -> Timetable:
    used = sorted(set(sent).union(*ticks))
    number = {tick: i for i, tick in enumerate(used)}
    messages = [Message(number[tick], *route) for tick, route in zip(sent, moves.routes)]
    messages.sort(key=lambda m: m.tick)
    return Timetable([[number[t] for t in row] for row in ticks], messages, len(used))


def action_of(plan: Plan, instructions: Sequence[Instruction]) -> Action:
    """The action of the plan that the instructions spell out, or the first of them."""
    form, microbatch, *_ = instructions[0]
    return Action(bisect_right(plan.stage_bounds, form.piece) - 1, form.phase, microbatch)


def _waits(plan: Plan, rows: Rows, moves: Flow, sent, ticks):
    for device, row in enumerate(rows):
        if (at := len(ticks[device])) < len(row):
            missing = [moves.routes[m][2] for m in moves.needs[device][at] if sent[m] is None]
            missing += [moves.stuck[device][at]] if at in moves.stuck[device] else []
            what, piece, value, microbatch = min(missing)
            yield (
                f"device {device} waits in {action_of(plan, row[at])} for the {what} {value}".rstrip()
                + f" of piece {plan.pieces[piece]!r}, micro-batch {microbatch}"
            )
