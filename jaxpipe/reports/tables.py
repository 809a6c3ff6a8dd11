"""Tables for the terminal."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from jaxpipe.costs.table import CostTable
from jaxpipe.planning.simulator import Simulation
from jaxpipe.reports.units import format_bytes, format_count, format_duration


class PlanRow(NamedTuple):
    """One plan in `plans_table`; times in the unit of the cost table.

    makespan: as the dependencies between actions allow. on_ticks: with the permutes of every tick.
    """

    name: str
    makespan: float
    on_ticks: float
    bubble_fraction: float
    peak_bytes: float
    lower_bound: float


class PieceRow(NamedTuple):
    """One kind of pieces in `pieces_table`.

    count: number of pieces; parameters: of all of them together.
    F, I, W: mean time of one piece and one micro-batch.
    """

    kind: str
    count: int
    parameters: int
    F: float
    I: float
    W: float


def plan_row(name: str, simulation: Simulation, on_ticks: float, lower_bound: float) -> PlanRow:
    """The row of a simulated plan; its memory is that of the fullest device."""
    peak = max(simulation.peak_bytes)
    return PlanRow(name, simulation.makespan, on_ticks, simulation.bubble_fraction, peak, lower_bound)


def plans_table(
    rows: Sequence[PlanRow], unit: str, chosen: str | None = None, memory_limit_bytes: float | None = None
) -> Table:
    """Plans side by side, in the order given; a peak above the memory limit is red.

    unit: time unit of the rows. chosen: name of the plan to mark.
    """
    table = _table("plan", "makespan", "on ticks", "bubble", "memory", "over bound")
    table.caption = (
        "on ticks: makespan where devices meet at the permutes of every tick\n"
        "bubble: idle share of devices × makespan; memory: peak of the fullest device\n"
        "over bound: makespan / lower bound"
    )
    for row in rows:
        mark = row.name == chosen
        over = memory_limit_bytes is not None and row.peak_bytes > memory_limit_bytes
        table.add_row(
            f"{'>' if mark else ' '} {row.name}",
            format_duration(row.makespan, unit),
            format_duration(row.on_ticks, unit),
            f"{row.bubble_fraction:.1%}",
            Text(format_bytes(row.peak_bytes), style="red" if over else ""),
            f"{row.makespan / row.lower_bound:.3f}",
            style="bold green" if mark else None,
        )
    return table


def dispatch_line(ops: int, patterns: int, stacked: Sequence[str]) -> str:
    """What a step is compiled from: ops, sets of permutes, and how parameter slots are stored.

    stacked: kinds whose slots share ops.
    """
    slots = f"stacked for {', '.join(stacked)}" if stacked else "static"
    return f"ops: {ops}, patterns of permutes: {patterns}, parameter slots: {slots}"


def piece_rows(costs: CostTable, parameters: Mapping[str, int]) -> list[PieceRow]:
    """One row for each kind of pieces, in order of first appearance.

    parameters: number of parameters of each piece, by name.
    """
    groups = {}
    for piece in costs.pieces:
        groups.setdefault(piece.kind, []).append(piece)
    return [
        PieceRow(
            kind,
            len(group),
            sum(parameters[piece.name] for piece in group),
            *(sum(getattr(piece, phase) for piece in group) / len(group) for phase in "FIW"),
        )
        for kind, group in groups.items()
    ]


def pieces_table(rows: Sequence[PieceRow], unit: str) -> Table:
    """What each kind of pieces holds and costs, with its share of the whole time; `unit` of the times."""
    times = [row.count * (row.F + row.I + row.W) for row in rows]
    whole = sum(times)
    table = _table("kind", "count", "parameters", "F", "I", "W", "share")
    table.caption = "F, I, W: forward, input gradient, weight gradient of one piece and micro-batch"
    for row, time in zip(rows, times):
        table.add_row(
            row.kind,
            str(row.count),
            format_count(row.parameters),
            *(format_duration(value, unit) for value in (row.F, row.I, row.W)),
            f"{time / whole:.1%}" if whole else "-",
        )
    table.add_section()
    pieces, parameters = sum(row.count for row in rows), sum(row.parameters for row in rows)
    sums = (format_duration(sum(r.count * getattr(r, phase) for r in rows), unit) for phase in "FIW")
    table.add_row(
        "all", str(pieces), format_count(parameters), *sums, "100.0%" if whole else "-", style="bold"
    )
    return table


def _table(first: str, *others: str) -> Table:
    """An empty table: one column of names, the others numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption_justify="left")
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table
