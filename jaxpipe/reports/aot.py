"""Tables of a step that was compiled for absent devices."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rich import box
from rich.table import Table

from jaxpipe.reports.units import format_bytes


class OpRow(NamedTuple):
    """One op of the compiled step.

    name: kind and phase; ops on other parameter slots have the same.
    kernels: instructions that launch something, what stands in a loop once; matmuls: those among them.
    custom_calls: target of a kernel that is a library's -> their number.
    workspace_bytes: what the op needs beside what it reads and writes, compiled alone.
    """

    name: str
    kernels: int
    matmuls: int
    custom_calls: Mapping[str, int]
    workspace_bytes: int


def ops_table(rows: Sequence[OpRow]) -> Table:
    """One line for all ops of a name; where they were compiled differently, the fewest and the most."""
    table = _table("op", "slots", "kernels", "matmuls", "workspace")
    table.caption = "kernels: launches, what stands in a loop counted once; workspace: compiled alone"
    groups: dict[str, list[OpRow]] = {}
    for row in rows:
        groups.setdefault(row.name, []).append(row)
    for name, group in groups.items():
        table.add_row(
            name,
            str(len(group)),
            _range(r.kernels for r in group),
            _range(r.matmuls for r in group),
            format_bytes(group[0].workspace_bytes),
        )
    return table


def memory_table(predicted_bytes: Mapping[str, int], peak_bytes: int) -> Table:
    """Predicted bytes a device by part, and their sum beside the compiled program's."""
    table, total = _table("memory of one device", "bytes", "share"), sum(predicted_bytes.values())
    for part, size in predicted_bytes.items():
        table.add_row(part, format_bytes(size), f"{size / total:.1%}")
    table.add_section()
    table.add_row("predicted", format_bytes(total), "100.0%")
    table.add_row("compiled", format_bytes(peak_bytes), f"{peak_bytes / total:.1%}", style="bold")
    return table


def library_calls(rows: Sequence[OpRow]) -> dict[str, int]:
    """Target -> kernels of all ops that are a library's."""
    found = Counter()
    for row in rows:
        found.update(row.custom_calls)
    return dict(found)


def _range(numbers: Iterable[int]) -> str:
    counts = sorted(set(numbers))
    return f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table
