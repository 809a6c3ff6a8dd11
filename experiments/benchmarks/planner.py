"""The tuner beside published planners, proven optima, bounds and plans by name.

    python -m experiments.benchmarks.planner [--sections=cells,times]

Every section has bars, says PASS or MISS of each, and how long it took; the program exits with 1 when a bar
is missed. Times of steps are simulated, unless they are called published or measured.
"""

import sys
import time
from collections.abc import Callable

from absl import app, flags
from rich.console import Console

from experiments.benchmarks import planner_a100, planner_cells, planner_gap, planner_long
from experiments.benchmarks.output import begin, write_results
from experiments.benchmarks.planner_section import Section

SECTIONS: dict[str, Callable[[], Section]] = {
    "cells": planner_cells.gains,
    "ablation": planner_cells.ablation,
    "times": planner_cells.times,
    "gap": planner_gap.gap,
    "a100": planner_a100.a100,
    "long": planner_long.long,
    "sensitivity": planner_cells.sensitivity,
}
"""Every section by name."""

CHOSEN = flags.DEFINE_list("sections", None, "names of the sections to run; by default all")


def main(argv: list[str]) -> None:
    """Prints the sections; exits with 1 when a bar is missed."""
    begin(argv, devices=1)
    names = CHOSEN.value or list(SECTIONS)
    if unknown := [name for name in names if name not in SECTIONS]:
        sys.exit(f"planner: unknown sections {unknown}; known: {', '.join(SECTIONS)}")
    console, results, missed = Console(), {}, []
    for name in names:
        make, start = SECTIONS[name], time.perf_counter()
        section = make()
        seconds = time.perf_counter() - start
        console.print(f"{name}: {make.__doc__.splitlines()[0]}", soft_wrap=True, highlight=False)
        for table in section.tables:
            console.print(table)
        for line in (*section.notes, *section.bars, f"{name} took {seconds:.0f} s"):
            console.print(str(line), soft_wrap=True, highlight=False)
        console.print()
        bars = [bar._asdict() for bar in section.bars]
        results[name] = {"rows": section.data, "bars": bars, "notes": section.notes, "seconds": seconds}
        missed += [f"{name}: {bar}" for bar in section.bars if not bar.holds]
    print(f"{len(missed)} bars missed", *missed, sep="\n")
    write_results({"sections": results, "missed": missed})
    sys.exit(bool(missed))


if __name__ == "__main__":
    app.run(main)
