"""Schedules as CSV in the grammar of PyTorch's `torch.distributed.pipelining`.

One row a device, one action a cell, an empty cell where the device idles. Cells say nothing about
time, so idle cells are dropped when read and never written.
"""

from jaxpipe.planning.plan import Action, Schedule


def write_csv(schedule: Schedule) -> str:
    """The schedule as CSV text, compact: a device without actions has an empty line."""
    return "".join(",".join(map(str, row)) + "\n" for row in schedule)


def read_csv(text: str) -> Schedule:
    """The inverse of `write_csv`; idle cells are dropped.

    Raises:
      ValueError: naming row and column (from 1) of a cell that is not an action, such as a
        communication (`0SEND_F1`) or an overlapped pair (`(0F7;7B3)OVERLAP_F_B`).
    """
    lines = text.splitlines()
    if not lines:
        raise ValueError("an empty text is not a schedule; expected one row for each device")
    return tuple(
        tuple(_parse(row, column, cell) for column, cell in enumerate(line.split(","), 1) if cell.strip())
        for row, line in enumerate(lines, 1)
    )


def _parse(row: int, column: int, cell: str) -> Action:
    try:
        return Action.parse(cell)
    except ValueError as error:
        raise ValueError(f"row {row}, column {column}: {error}") from error
