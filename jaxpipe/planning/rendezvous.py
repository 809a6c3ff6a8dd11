"""Whether the sends and receives of a schedule meet.

Both ends of a message wait for each other, and a device works off its cells in order: so do sends and
receives on one communicator of NCCL, whose stream keeps their order. A schedule that runs where sends are
buffered may therefore stop on GPUs (pytorch/pytorch#172668).
"""

from collections.abc import Mapping

from jaxpipe.planning.faults import Fault, Place, Shape, where
from jaxpipe.planning.interchange import Cell, Message, Sheet
from jaxpipe.planning.plan import Action


def has_messages(sheet: Sheet) -> bool:
    """Whether any cell sends or receives."""
    return any(cell.message for row in sheet.rows for cell in row)


def wrong_message(sheet: Sheet, shape: Shape) -> Fault | None:
    """The first message that is sent before it is made or used before it is received, or that has one end.

    sheet: complete and without wrong cells.
    """
    ends: dict[Message, Place] = {}
    for device, row in enumerate(sheet.rows):
        for cell in row:
            if cell.message:
                here = Place(device, cell.column)
                if cell.message in ends:
                    first = where(ends[cell.message])
                    return _fault(here, f"{cell.message} is wrong: it stands twice, first at {first}")
                ends[cell.message] = here
    for message, here in ends.items():
        if (other := twin(message)) not in ends:
            return _fault(here, f"{message} waits for {other}, which is missing")
    for device, row in enumerate(sheet.rows):
        past: set[Action | Message] = set()
        for cell in row:
            here = Place(device, cell.column)
            if cell.message and cell.message.kind.startswith("SEND"):
                made = _made(cell.message)
                if past.isdisjoint(made):
                    return _fault(here, f"{cell.message} is wrong: it stands before what it sends, {made[0]}")
            elif cell.message:
                past.add(cell.message)
            for action in cell.actions:
                wanted = _received(action, device, shape)
                if wanted and wanted not in past:
                    return _fault(
                        here, f"{action} is wrong: it stands before {wanted}, whose message it needs"
                    )
                past.add(action)
    return None


def deadlock(sheet: Sheet) -> Fault | None:
    """Devices that wait for each other in a circle, each at a send or a receive; actions take no time.

    Messages whose other end is missing wait for ever.
    """
    rows = [[cell for cell in row if cell.message] for row in sheet.rows]
    homes = {cell.message: device for device, row in enumerate(rows) for cell in row}
    done = [0] * len(rows)
    ready = list(range(len(rows)))
    while ready:
        device = ready.pop()
        while done[device] < len(rows[device]):
            other = twin(rows[device][done[device]].message)
            peer = homes.get(other, device)
            if peer == device or done[peer] == len(rows[peer]) or rows[peer][done[peer]].message != other:
                break
            done[device] += 1
            done[peer] += 1
            ready.append(peer)
    stops = {d: row[n] for d, (row, n) in enumerate(zip(rows, done)) if n < len(row)}
    return circle(stops, {d: (str(twin(c.message)), homes.get(twin(c.message))) for d, c in stops.items()})


def circle(stops: Mapping[int, Cell], waits: Mapping[int, tuple[str, int | None]]) -> Fault | None:
    """The fault of devices that stopped for good; None when there are none.

    stops: the cell at which each device stopped. waits: what it waits for, and on which device that
      stands; None for nowhere.
    """
    if not stops:
        return None
    path = [min(stops)]
    while (following := waits[path[-1]][1]) is not None and following not in path:
        path.append(following)
    if following is not None:
        path = path[path.index(following) :]
        first = path.index(min(path))
        path = path[first:] + path[:first]
    clauses = []
    for device in path:
        name, home = waits[device]
        place = "stands on no device" if home is None else f"stands later on device {home}"
        clauses.append(f"device {device} stops at {stops[device].text} and waits for {name}, which {place}")
    places = tuple(Place(device, stops[device].column) for device in path)
    return Fault(f"{where(places[0])}: deadlock: {'; '.join(clauses)}", places)


def twin(message: Message) -> Message:
    """The other end of a message."""
    stage, kind, microbatch = message
    act, _, way = kind.partition("_")
    step = 1 if (act == "SEND") == (way == "F") else -1
    return Message(stage + step, f"{'RECV' if act == 'SEND' else 'SEND'}_{way}", microbatch)


def _made(message: Message) -> tuple[Action, ...]:
    """The actions of which one makes what is sent."""
    phases = "F" if message.kind == "SEND_F" else "BI"
    return tuple(Action(message.stage, phase, message.microbatch) for phase in phases)


def _received(action: Action, device: int, shape: Shape) -> Message | None:
    """The message that an action needs from another device."""
    stage, phase, microbatch = action
    source = stage - 1 if phase == "F" else stage + 1
    border = stage % shape.length == (0 if phase == "F" else shape.length - 1)
    if phase == "W" or border or shape.homes[source, microbatch] == device:
        return None
    return Message(stage, "RECV_F" if phase == "F" else "RECV_B", microbatch)


def _fault(place: Place, text: str) -> Fault:
    return Fault(f"{where(place)}: {text}", (place,))
