"""Schedules as CSV in the grammar of PyTorch's `torch.distributed.pipelining`.

One row a device, one cell a step, an empty cell where the device idles:

    0F3, 0I3, 0W3, 0B3            forward, input gradient, weight gradient, both gradients at once
    (0F7;7B3)OVERLAP_F_B          a forward and a backward that run as one
    0SEND_F3, 1RECV_F3            activations on their way; SEND_B and RECV_B: gradients
    0UNSHARD, 0RESHARD, 0REDUCE_GRAD   of data parallelism; they say nothing about the schedule

Until late 2024 PyTorch wrote B for the input gradient and BW for both (pytorch/pytorch#138886 changed it).
A text is of that age when it has a BW, or when it has no I and the B are of exactly those stages and
micro-batches that the W are of. Cells say nothing about time, so idle ones are never written.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jaxpipe.planning.plan import Action, Schedule

MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
SHARDING = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
LARGEST_BYTES = 16 << 20
"""Larger files are no schedules."""

# Nine digits are more than any schedule has, and few enough for what comes after.
_ACTION = re.compile(r"(\d{1,9})(F|I|W|BW|B)(\d{1,9})", re.ASCII)
_MESSAGE = re.compile(rf"(\d{{1,9}})({'|'.join(MESSAGES)})(\d{{1,9}})", re.ASCII)
_SHARDING = re.compile(rf"\d{{1,9}}({'|'.join(SHARDING)})", re.ASCII)
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


class Message(NamedTuple):
    """One end of a message: the stage that sends or receives, one of MESSAGES, and the micro-batch."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Cell(NamedTuple):
    """One cell that is not empty.

    column: from 1. text: as it stands in the file.
    actions: none, one, or the two of a pair that runs as one.
    message: what is sent or received; None for actions and for SHARDING.
    """

    column: int
    text: str
    actions: tuple[Action, ...] = ()
    message: Message | None = None


class Sheet(NamedTuple):
    """A schedule as it stands in a file: for each device its cells in order, idle ones left out.

    older: B was read as the input gradient and BW as both gradients.
    """

    rows: tuple[tuple[Cell, ...], ...]
    older: bool = False

    @property
    def schedule(self) -> Schedule:
        """The actions alone; those of a pair in order."""
        return tuple(tuple(action for cell in row for action in cell.actions) for row in self.rows)

    @property
    def skipped(self) -> dict[str, int]:
        """How many cells of each kind of communication `schedule` leaves out."""
        other = [cell for row in self.rows for cell in row if not cell.actions]
        return dict(Counter(c.message.kind if c.message else c.text.lstrip("0123456789") for c in other))


def write_csv(schedule: Schedule) -> str:
    """The schedule as CSV text, compact, such as PyTorch's runtime of schedules loads.

    Raises:
      ValueError: for what that runtime has no way to say: a device without actions, a stage on several
        devices (as attention that floats, or the second direction of a bidirectional pipeline), stages
        that do not count from 0, and stages that run different micro-batches.
    """
    homes: dict[int, int] = {}
    microbatches: dict[int, set[int]] = {}
    for device, row in enumerate(schedule):
        if not row:
            raise ValueError(f"device {device} has no action, which PyTorch's CSV cannot express")
        for action in row:
            home = homes.setdefault(action.stage, device)
            if home != device:
                raise ValueError(
                    f"stage {action.stage} runs on devices {home} and {device} ({action}), which PyTorch's "
                    "CSV cannot express: there a stage has one device"
                )
            microbatches.setdefault(action.stage, set()).add(action.microbatch)
    for number, stage in enumerate(sorted(homes)):
        if number != stage:
            raise ValueError(f"no device runs stage {number}, which PyTorch's CSV cannot express")
        if differing := microbatches[stage] ^ microbatches[0]:
            raise ValueError(
                f"of stages 0 and {stage} only one runs micro-batch {min(differing)}, which PyTorch's CSV "
                "cannot express: there each stage runs all"
            )
    return "".join(",".join(map(str, row)) + "\n" for row in schedule)


def sheet_of(schedule: Schedule) -> Sheet:
    """The sheet that has the actions of a schedule and nothing else."""
    return Sheet(tuple(tuple(Cell(i, str(a), (a,)) for i, a in enumerate(row, 1)) for row in schedule))


def read_csv(text: str) -> Schedule:
    """The actions of a CSV text: pairs become two actions in order; what is no computation is left out.

    Raises:
      ValueError: as `read_sheet`.
    """
    return read_sheet(text).schedule


def read_sheet(text: str) -> Sheet:
    """All that a CSV text says. Empty lines at the end are no devices.

    Raises:
      ValueError: naming line (from 1), device (from 0), column (from 1) and text of a cell that is wrong.
    """
    lines = re.split(r"\r\n|\r|\n", text)
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise ValueError("an empty text is not a schedule; expected one row for each device")
    rows = tuple(tuple(_cells(row, line)) for row, line in enumerate(lines, 1))
    older = _is_older(rows)
    return Sheet(tuple(tuple(map(_modern, row)) for row in rows) if older else rows, older)


def read_file(path: Path | str) -> Sheet:
    """What the CSV file `path` says.

    Raises:
      ValueError: as `read_text`, or naming the file and a wrong cell.
    """
    text = read_text(path)
    try:
        return read_sheet(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_text(path: Path | str) -> str:
    """The text of a CSV file, for `read_sheet`.

    Raises:
      ValueError: naming the file that cannot be read, is no text, or is too large.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST_BYTES + 1)
        if len(data) > LARGEST_BYTES:
            raise ValueError(f"{path}: larger than {LARGEST_BYTES >> 20} MiB; expected a schedule as CSV")
        if b"\0" in data:
            raise ValueError(
                f"{path}: byte {data.index(0)} is 0, so this is no text; expected a schedule as CSV"
            )
        return data.decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; expected a schedule as CSV") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8; expected a schedule as CSV") from error


def _cells(row: int, line: str) -> Iterator[Cell]:
    """The cells of a line that are not empty, in the words of its age: B and BW as they stand."""
    for column, field in enumerate(line.split(","), 1):
        text = field.strip()
        if not text:
            continue
        if match := _ACTION.fullmatch(text):
            yield Cell(column, text, (_action(match),))
        elif match := _MESSAGE.fullmatch(text):
            yield Cell(column, text, (), Message(int(match[1]), match[2], int(match[3])))
        elif _SHARDING.fullmatch(text):
            yield Cell(column, text)
        elif match := _PAIR.fullmatch(text):
            parts = [_ACTION.fullmatch(part.strip()) for part in match.groups()]
            if not all(parts) or parts[0][2] != "F" or parts[1][2] in "FW":
                raise ValueError(
                    f"{_where(row, column)}: {_shown(text)} is not an overlapped pair; expected a "
                    "forward and a backward, as in (0F7;7B3)OVERLAP_F_B"
                )
            yield Cell(column, text, tuple(map(_action, parts)))
        else:
            raise ValueError(
                f"{_where(row, column)}: {_shown(text)} is not an action; expected stage, one of F I W "
                f"B {' '.join(MESSAGES)}, micro-batch, as in 0F3, with at most 9 digits each; "
                f"or stage and one of {' '.join(SHARDING)}; or a pair as in (0F7;7B3)OVERLAP_F_B"
            )


def _action(match: re.Match) -> Action:
    return Action(int(match[1]), match[2], int(match[3]))


def _where(row: int, column: int) -> str:
    """Where a cell stands; row and column from 1, as editors count them."""
    return f"line {row} (device {row - 1}), column {column}"


def _shown(text: str) -> str:
    """The text of a cell for an error in one line."""
    return repr(text if len(text) <= 60 else text[:60] + "...")


def _is_older(rows: tuple[tuple[Cell, ...], ...]) -> bool:
    places: dict[str, set[tuple[int, int]]] = {phase: set() for phase in ("F", "I", "W", "B", "BW")}
    for row, cells in enumerate(rows, 1):
        for cell in cells:
            for action in cell.actions:
                places[action.phase].add((action.stage, action.microbatch))
            if places["BW"] and places["I"]:
                raise ValueError(
                    f"{_where(row, cell.column)}: {cell.text!r} mixes two grammars; expected F I W "
                    "B, or F B W BW as PyTorch wrote until 2024"
                )
    return bool(places["BW"]) or (not places["I"] and bool(places["W"]) and places["W"] == places["B"])


def _modern(cell: Cell) -> Cell:
    """A cell of the older grammar in today's words."""
    words = {"B": "I", "BW": "B"}
    return cell._replace(actions=tuple(a._replace(phase=words.get(a.phase, a.phase)) for a in cell.actions))
