"""Time on ticks over the time that the dependencies allow, by lengths, schedules and patterns of permutes.

    python -m experiments.benchmarks.ticks

A program's time is that of the recurrence in `jaxpipe/program/recurrence.py`, the ideal that of
`jaxpipe/planning/simulator.py` for the same schedule. Messages take no time, so what shows is how devices
wait for each other because they meet at permutes.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from absl import app, flags
from rich.console import Console

from experiments.benchmarks.output import begin, make_table, write_results
from jaxpipe.costs.table import CostTable, PieceCost
from jaxpipe.planning.plan import Plan
from jaxpipe.planning.schedules import SCHEDULES
from jaxpipe.planning.simulator import simulate
from jaxpipe.program.arrange import arrange
from jaxpipe.program.spec import PhaseSpec, PieceSpec

DEVICES = flags.DEFINE_multi_integer("devices", [4, 8, 16], "pipeline devices", lower_bound=2)
MICROBATCHES = flags.DEFINE_integer("microbatches", 4, "micro-batches for each device", lower_bound=1)

Times = tuple[float, float, float]
"""F, I and W."""

EQUAL: Times = (1.0, 1.0, 1.0)
LENGTHS = {
    "F = I = W": EQUAL,
    "1 / 1.3 / 0.7": (1.0, 1.3, 0.7),
    "1 / 1.67 / 0.22": (1.0, 1.67, 0.22),
}
"""F, I and W; in the last I computes the forward again."""
UNEVEN = "F = I = W, ±20%"
EXACT = 10**6
"""More patterns than any of the programs has ticks."""


class Cell(NamedTuple):
    """One program: its time over the ideal, and how many patterns it is compiled with."""

    ratio: float
    patterns: int


def main(argv: list[str]) -> None:
    """Prints the table."""
    begin(argv, devices=1)
    title = f"recurrence over the ideal, {MICROBATCHES.value} micro-batches a device"
    table = make_table(title, "F / I / W", "schedule", "patterns", *(f"p={p}" for p in DEVICES.value))
    results = []
    for name, schedule, patterns in cases():
        cells = [
            measure(stage_times(name, p), MICROBATCHES.value * p, schedule, patterns) for p in DEVICES.value
        ]
        allowed = "full" if patterns == 1 else "exact" if patterns == EXACT else str(patterns)
        table.add_row(name, schedule, allowed, *(f"{c.ratio:.3f} ({c.patterns})" for c in cells))
        results.append({"lengths": name, "schedule": schedule, "allowed": allowed, "cells": cells})
    table.caption = "patterns: the most allowed; in brackets: used. ±20%: by stage"
    Console().print(table)
    write_results({"devices": DEVICES.value, "microbatches": MICROBATCHES.value, "rows": results})


def cases() -> list[tuple[str, str, int]]:
    """(lengths, schedule, patterns allowed) of each row."""
    apart = ("1f1b_split", "zb_h1")
    full = [(name, schedule, 1) for name in (*LENGTHS, UNEVEN) for schedule in apart]
    lopsided = [("1 / 1.67 / 0.22", schedule, count) for schedule in apart for count in (3, 8)]
    return full + lopsided + [("F = I = W", "1f1b", count) for count in (1, 2, 4, 8, EXACT)]


def stage_times(name: str, devices: int) -> list[Times]:
    """F, I, W of each stage; uneven ones are up to a fifth longer and shorter, by turns."""
    if name == UNEVEN:
        factors = [1 + (-1) ** d * 0.2 * (d + 1) / devices for d in range(devices)]
        return [(f, f, f) for f in factors]
    return [LENGTHS[name]] * devices


def measure(times: Sequence[Times], microbatches: int, schedule: str, patterns: int) -> Cell:
    """One program with one piece a stage and one stage a device."""
    devices = len(times)
    line, names = tuple(range(devices)), tuple(map(str, range(devices)))
    rows = SCHEDULES[schedule](devices, microbatches)
    plan = Plan(schedule, devices, microbatches, names, (*line, devices), line, ("none",) * devices, rows)
    costs = CostTable("unit", tuple(PieceCost(n, "stage", *t) for n, t in zip(names, times)))
    arranged, _ = arrange(plan, chain(names), costs, patterns)
    return Cell(arranged.makespan / simulate(plan, costs).makespan, len(arranged.patterns))


def chain(names: Sequence[str]) -> list[PieceSpec]:
    """Pieces that each read what the one before writes; the first reads and the last writes nothing."""
    specs = []
    for i, name in enumerate(names):
        reads, writes = {"x": i - 1} if i else {}, ("x",) if i + 1 < len(names) else ()
        backward = PhaseSpec(residuals=True, cotangents=writes)
        phases = {
            "F": PhaseSpec(tuple(reads), writes, residuals=True),
            "B": backward,
            "I": dataclasses.replace(backward, stash=True),
            "W": PhaseSpec(stash=True),
        }
        classes = {"x": "x"}
        specs.append(
            PieceSpec(name, "stage", "none", True, reads, writes, classes, phases, "residuals", "stash")
        )
    return specs


if __name__ == "__main__":
    app.run(main)
