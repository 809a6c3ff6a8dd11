"""The planner beside optima that CP-SAT proves, on small random problems.

Needs OR-tools, which `requirements-dev.txt` has, and the exact solver of the tests.
"""

import dataclasses
import time
from collections.abc import Iterator
from itertools import product
from random import Random
from statistics import mean
from typing import NamedTuple

from experiments.benchmarks.output import make_table
from experiments.benchmarks.planner_section import Bar, Section, at_least, at_most
from jaxpipe.costs.table import CostTable, Link, PieceCost
from jaxpipe.planning.named import named_plan
from jaxpipe.planning.plan import Plan
from jaxpipe.planning.simulator import simulate
from jaxpipe.planning.tune import tune
from tests.planning import exact

CASES = 30
"""Of either kind."""
MEAN, WORST = 0.01, 0.04
"""How much slower than the optimum plans may be."""
WORDS = {
    "one stage a device": ("partition", "schedule"),
    "all placements": ("partition", "placement", "schedule"),
}
"""What is tuned in problems of each kind; the optimum is over all plans that differ in no more."""


class Problem(NamedTuple):
    """A table with integer times and, where memory is limited, its limit."""

    kind: str
    costs: CostTable
    devices: int
    microbatches: int


def gap() -> Section:
    """How much slower plans are than the best of all, on random problems whose optimum CP-SAT proves."""
    table = make_table(
        "makespan over the optimum", "kind", "cases", "optimal", "mean", "worst", "s", "CP-SAT, s"
    )
    rows, skipped = [], 0
    for kind in WORDS:
        random, own = Random(len(rows)), []
        while len(own) < CASES:
            row = compare(random_problem(kind, random))
            if row is None:
                skipped += 1
            else:
                own.append(row)
        rows += own
        found = [row["gap"] for row in own if row["gap"] is not None]
        seconds = (f"{mean(row[name] for row in own):.2f}" for name in ("seconds", "exact_seconds"))
        optimal = str(sum(value == 0 for value in found))
        table.add_row(kind, str(len(own)), optimal, f"{mean(found):.2%}", f"{max(found):.2%}", *seconds)
    table.caption = "s: mean seconds of a search, and of the proof"
    found = [row["gap"] for row in rows if row["gap"] is not None]
    unfound = len(rows) - len(found)
    bars = (
        at_least("cases", 50, len(rows)),
        at_most("mean gap", MEAN, mean(found)),
        at_most("worst gap", WORST, max(found)),
        Bar("a plan in every case that has one", f"{unfound} without", not unfound),
    )
    note = f"{skipped} more problems have no plan within their memory limit, or none was proven best in time."
    return Section((table,), bars, rows, (note,))


def random_problem(kind: str, random: Random) -> Problem:
    """Integer times of 1 to 9; every third problem has messages, every second a memory limit."""
    devices, pieces, microbatches = _sizes(kind, random)
    times = [[random.randint(1, 9) for _ in "FIW"] for _ in range(pieces)]
    held = [(random.randint(1, 4), random.randint(0, 3)) for _ in range(pieces)]
    link = Link(random.randint(1, 4) if random.random() < 1 / 3 else 0)
    costs = CostTable(
        "unit",
        tuple(
            PieceCost(f"p{i}", "k", *time, stash_bytes=stash, grad_stash_bytes=gradient)
            for i, (time, (stash, gradient)) in enumerate(zip(times, held))
        ),
        link,
    )
    if random.random() < 1 / 2:
        usual = simulate(named_plan("s_1f1b", costs, devices, microbatches), costs)
        limit = int(random.uniform(0.6, 1.3) * max(usual.peak_bytes))
        costs = dataclasses.replace(costs, memory_limit_bytes=limit)
    return Problem(kind, costs, devices, microbatches)


def _sizes(kind: str, random: Random) -> tuple[int, int, int]:
    """Devices, pieces and micro-batches."""
    if kind == "one stage a device":
        return random.randint(2, 4), random.randint(5, 8), random.randint(4, 8)
    devices, pieces = random.choice(((2, 4), (2, 5), (3, 4)))
    return devices, pieces, random.randint(3, 4)


def blank_plans(problem: Problem) -> Iterator[Plan]:
    """Plans without a schedule, the best of which is the best of all.

    With all placements every piece is a stage: no plan is slower or takes more memory for that, as what runs
    in one action may as well run in several, one right after the other. Devices are alike, so the first stage
    of each comes after those of the devices before it.
    """
    costs, devices, microbatches = problem.costs, problem.devices, problem.microbatches
    if problem.kind == "one stage a device":
        yield from exact.partitions(costs, range(devices), microbatches)
        return
    count = len(costs.pieces)
    for homes in product(range(devices), repeat=count):
        if all(home <= max(homes[:s], default=-1) + 1 for s, home in enumerate(homes)):
            blank = exact.blank_plan(costs, range(count + 1), homes, microbatches)
            yield dataclasses.replace(blank, devices=devices)


def compare(problem: Problem) -> dict | None:
    """The gap on one problem, None for none found; None in all where nothing is proven, or nothing fits."""
    kind, costs, devices, microbatches = problem
    limit, start = costs.memory_limit_bytes, time.perf_counter()
    limits = None if limit is None else [limit] * devices
    try:
        best = exact.best_plan(blank_plans(problem), costs, limits)
    except RuntimeError:
        return None
    if best is None:
        return None
    proven = time.perf_counter()
    try:
        makespan = tune(costs, devices, microbatches, WORDS[kind], memory_model="ideal")[0].makespan
    except ValueError:
        makespan = None
    return {
        "kind": kind,
        "devices": devices,
        "pieces": len(costs.pieces),
        "microbatches": microbatches,
        "latency": costs.link.latency,
        "limited": limit is not None,
        "optimum": best.makespan,
        "makespan": makespan,
        "gap": makespan and makespan / best.makespan - 1,
        "seconds": time.perf_counter() - proven,
        "exact_seconds": proven - start,
    }
