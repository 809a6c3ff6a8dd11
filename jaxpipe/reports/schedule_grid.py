"""A schedule as it stands in its file, with wrong actions marked, for the terminal."""

from collections.abc import Sequence
from itertools import pairwise

from rich import box
from rich.table import Table
from rich.text import Text

from jaxpipe.planning.faults import Place
from jaxpipe.planning.interchange import Cell, Sheet
from jaxpipe.planning.judge import Verdict
from jaxpipe.reports.units import format_bytes, format_duration

MARK = "bold white on red"


def schedule_grid(sheet: Sheet, places: Sequence[Place], width: int) -> Text:
    """One line a device, one column a cell; the cells at `places`, at least one, in red and between > and <.

    What does not fit into `width` characters is cut off so that the first place stays in sight.
    """
    shown = [{cell.column: f" {_label(cell)} " for cell in row} for row in sheet.rows]
    marked = set()
    for device, column in places:
        column = column or max(shown[device], default=0) + 1
        marked.add((device, column))
        shown[device][column] = f">{shown[device].get(column, ' ? ').strip()}<"
    last = max((max(row, default=0) for row in shown), default=0)
    sizes = {
        column: max(len(str(column)) + 2, *(len(row.get(column, "")) for row in shown))
        for column in range(1, last + 1)
    }
    side = len(f"device {len(shown) - 1}") + 1
    middle = places[0].column or max(shown[places[0].device])
    first, stop = _window(sizes, middle, width - side - 2)
    left, right = "…" if first > 1 else " ", "…" if stop <= last else ""
    header = "".join(f" {column}".ljust(sizes[column]) for column in range(first, stop))
    grid = Text(no_wrap=True, overflow="ignore")
    grid.append(f"{'column':<{side}} {header}".rstrip(), style="dim")
    for device, row in enumerate(shown):
        grid.append(f"\n{f'device {device}':<{side}}{left}")
        for column in range(first, stop):
            text = row.get(column, "")
            grid.append(text, style=MARK if (device, column) in marked else None)
            grid.append(" " * (sizes[column] - len(text)))
        grid.append(right)
    return grid


def verdict_lines(sheet: Sheet, verdict: Verdict, unit: str, partition: str = "balanced") -> list[str]:
    """What a valid schedule is and comes to, and what was left out of it.

    partition: how pieces came to their stages, in a word or two.
    """
    stages = len(verdict.stage_to_device)
    lines = [
        f"valid: {len(sheet.rows)} devices, {stages} stages, {verdict.microbatches} micro-batches",
        f"makespan {format_duration(verdict.makespan, unit)}, bubble {verdict.bubble_fraction:.2%}",
    ]
    if verdict.chains > 1:
        half = stages // verdict.chains
        lines.append(f"{verdict.chains} chains of {half} stages, each with micro-batches of its own")
    if verdict.stage_bounds:
        parts = [str(a) if a + 1 == b else f"{a}-{b - 1}" for a, b in pairwise(verdict.stage_bounds)]
        pieces, of_each = verdict.stage_bounds[-1], " of each chain" if verdict.chains > 1 else ""
        lines.append(f"{pieces} pieces on {len(parts)} stages{of_each}, {partition}: {', '.join(parts)}")
    if verdict.floating:
        lines.append(f"on several devices: stages {' '.join(map(str, verdict.floating))}")
    if sheet.older:
        lines.append("B was read as the input gradient, BW as both, as PyTorch wrote until 2024")
    if sheet.skipped:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(sheet.skipped.items()))
        lines.append(f"cells that take no time here: {counts}")
    return lines


def verdict_table(verdict: Verdict, unit: str, peak_bytes: Sequence[float] | None = None) -> Table:
    """What each device of a valid schedule does; times in `unit` of cost tables."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption_justify="left")
    names = ["device", "stages", "busy", "idle inside", "in flight"] + ["memory"] * (peak_bytes is not None)
    for name in names:
        table.add_column(name, justify="right", no_wrap=name != "stages")
    table.caption = (
        "idle inside: between its first start and last end\n"
        "in flight: most pairs of stage and micro-batch between F and the end of the backward"
    )
    for device, row in enumerate(verdict.events):
        stages = sorted({event.action.stage for event in row})
        cells = [str(device), " ".join(map(str, stages)), format_duration(verdict.busy[device], unit)]
        cells.append(format_duration(verdict.internal_idle[device], unit))
        cells.append(str(verdict.peak_in_flight[device]))
        if peak_bytes is not None:
            cells.append(format_bytes(peak_bytes[device]))
        table.add_row(*cells)
    return table


def _label(cell: Cell) -> str:
    """The text of a cell, short for pairs."""
    return ";".join(map(str, cell.actions)) if len(cell.actions) > 1 else cell.text


def _window(sizes: dict[int, int], middle: int, width: int) -> tuple[int, int]:
    """First column and the one after the last of a run around `middle` that fits into `width`."""
    first, stop, used = middle, middle + 1, sizes[middle]
    while True:
        grown = False
        for column in (first - 1, stop):
            if column in sizes and used + sizes[column] <= width:
                used, grown = used + sizes[column], True
                first, stop = min(first, column), max(stop, column + 1)
        if not grown:
            return first, stop
