"""What every section of the planner's benchmark gives back."""

from typing import NamedTuple

from rich.table import Table

ROUNDING = 1 + 1e-9
"""Relative; sums of times are not exact."""


class Bar(NamedTuple):
    """What is asked of a section, what was found, and whether that is it."""

    asked: str
    found: str
    holds: bool

    def __str__(self) -> str:
        return f"{'PASS' if self.holds else 'MISS'}  {self.asked}: {self.found}"


class Section(NamedTuple):
    """tables, notes: to be printed. data: rows for the JSON file."""

    tables: tuple[Table, ...]
    bars: tuple[Bar, ...]
    data: list[dict]
    notes: tuple[str, ...] = ()


def at_least(what: str, asked: float, found: float) -> Bar:
    """A number that should be no lower."""
    return Bar(f"{what} at least {asked:g}", f"{found:.4g}", found >= asked)


def at_most(what: str, asked: float, found: float) -> Bar:
    """A number that should be no higher."""
    return Bar(f"{what} at most {asked:g}", f"{found:.4g}", found <= asked)
