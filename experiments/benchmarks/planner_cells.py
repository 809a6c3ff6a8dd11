"""The planner on published problems: gains, ablation, search time, and plans with costs that are off."""

import dataclasses
import time
from collections.abc import Sequence
from itertools import combinations
from statistics import mean

import numpy as np

from experiments.benchmarks.output import make_table
from experiments.benchmarks.planner_section import ROUNDING, Bar, Section, at_least, at_most
from experiments.benchmarks.published_cells import (
    MODELS,
    Cell,
    bounds,
    cell_costs,
    cells,
    measured_gain,
    published,
)
from jaxpipe.costs.table import CostTable, PieceCost
from jaxpipe.planning.named import NAMED, named_plan
from jaxpipe.planning.perturb import spreads
from jaxpipe.planning.plan import Plan
from jaxpipe.planning.simulator import simulate
from jaxpipe.planning.tune import USUAL, tune

ROOM = 2
"""Memory limit over what S-1F1B holds on its first device."""
ASKED = {"limited": 1.45, "unlimited": 1.52, "split": 1.60}
"""Mean gain asked of each way to tune; see `cell_row`."""
WAYS = ("octopipe", *ASKED)
ABLATED = ("partition", "placement", "schedule")
"""The paper's phases 1, 2 and 3."""
TIMED = Cell("Nemotron-H", "Large", 4096)
TIMED_MICROBATCHES, LONGEST = (16, 64, 256), 5.0
"""Micro-batches of the timed searches; seconds that the last may take."""
SPREAD, DRAWS, SHARE = 0.05, 400, 0.95
"""Spread of the costs, draws of them, and the part of these in which the tuned plan should win."""


def gains() -> Section:
    """Throughput over S-1F1B on the 18 published problems."""
    rows = [cell_row(cell) for cell in cells()]
    table = make_table("throughput over S-1F1B", "cell", "published", *WAYS, "seconds")
    near = make_table(
        "makespan over the bounds, and throughput over S-1F1B at these",
        *("cell", "bound", "filled", "split", *(f"{way}/" for way in WAYS), "free/filled"),
    )
    for row in [*rows, _means(rows)]:
        seconds = f"{row['seconds']:.1f}"
        table.add_row(row["cell"], f"{row['published']:.3f}", *(f"{row[way]:.3f}" for way in WAYS), seconds)
        most = (f"{row[bound]:.3f}" for bound in ("bound", "filled", "bound_split"))
        ratios = (f"{row[f'{way}_ratio']:.3f}" for way in (*WAYS, "filled"))
        near.add_row(row["cell"], *most, *ratios)
    near.caption = (
        "bound: total work or the head; filled: with fill and drain of the head's device; split: a head in "
        "as many shards as one likes, to which the makespan with a split head is compared"
    )
    below = [f"{row['cell']} {way}" for row in rows for way in ASKED if row[way] < row["published"]]
    bars = [at_least(f"mean gain, {way}", asked, _means(rows)[way]) for way, asked in ASKED.items()]
    bars.append(Bar("no cell below the published gain", ", ".join(below) or "none is", not below))
    return Section((table, near), tuple(bars), rows)


def cell_row(cell: Cell) -> dict:
    """Gains over S-1F1B and ratios to the bounds on one problem.

    octopipe: our implementation of its tuner. limited: our tuner with a memory limit of ROOM times what
    S-1F1B holds on its first device; unlimited: without; split: without, and the head may be cut.
    """
    costs, numbers, start = cell_costs(cell), (cell.devices, cell.microbatches), time.perf_counter()
    usual = simulate(named_plan("s_1f1b", costs, *numbers), costs)
    limited = dataclasses.replace(costs, memory_limit_bytes=ROOM * usual.peak_bytes[0])
    found = {
        "octopipe": simulate(named_plan("octopipe", costs, *numbers), costs).makespan,
        "limited": tune(limited, *numbers, memory_model="ideal")[0].makespan,
        "unlimited": tune(costs, *numbers, memory_model="ideal")[0].makespan,
        "split": tune(costs, *numbers, (*USUAL, "head"), memory_model="ideal")[0].makespan,
    }
    least = bounds(costs, *numbers)
    ratios = {way: value / (least.split if way == "split" else least.whole) for way, value in found.items()}
    ratios["filled"] = found["unlimited"] / least.filled
    return {
        "cell": str(cell),
        "published": measured_gain(cell),
        **{way: usual.makespan / makespan for way, makespan in found.items()},
        "bound": usual.makespan / least.whole,
        "filled": usual.makespan / least.filled,
        "bound_split": usual.makespan / least.split,
        **{f"{name}_ratio": ratio for name, ratio in ratios.items()},
        "seconds": time.perf_counter() - start,
    }


def _means(rows: Sequence[dict]) -> dict:
    numbers = {name: mean(row[name] for row in rows) for name in rows[0] if name != "cell"}
    return {"cell": "mean", **numbers}


def ablation() -> Section:
    """Throughput with some of partition (1), placement (2) and schedule (3) tuned, relative to all three."""
    subsets = [words for count in range(4) for words in combinations(ABLATED, count)]
    table = make_table("throughput relative to 1+2+3: published, ours", "model", *map(_numbers, subsets))
    rows, worse = [], []
    for model in MODELS:
        cell = Cell(model, "Medium", 4096)
        costs, numbers = cell_costs(cell), (cell.devices, cell.microbatches)
        makespans = [tune(costs, *numbers, words, memory_model="ideal")[0].makespan for words in subsets]
        ours = {_numbers(words): makespans[-1] / found for words, found in zip(subsets, makespans)}
        theirs = published()["ablation_data"][model]
        rows.append({"model": model, "cell": str(cell), "published": theirs, "ours": ours})
        worse += [f"{model} {name}" for name, found in ours.items() if found > ROUNDING]
        table.add_row(model, *(f"{theirs[name]:.3f}" for name in ours))
        table.add_row("", *(f"{found:.3f}" for found in ours.values()))
    bar = Bar("all three tuned are the best of each model", ", ".join(worse) or "they are", not worse)
    note = (
        "The published setting is not known; ours are the medium models with 4,096 tokens, no memory limit."
    )
    return Section((table,), (bar,), rows, (note,))


def _numbers(words: Sequence[str]) -> str:
    return "+".join(str(1 + ABLATED.index(word)) for word in words) or "Baseline"


def times() -> Section:
    """Seconds of a search with as many evaluations as usual, its loops compiled before."""
    tiny = CostTable("unit", tuple(PieceCost(f"p{i}", "k", 1.0, 1.0, 1.0) for i in range(4)))
    tune(tiny, 2, 4, evaluations=20)
    theirs = published()["solving_time"]["L"]["OctoPipe"]
    costs = cell_costs(TIMED)
    table = make_table(str(TIMED), "micro-batches", "published, s", "ours, s", "over the bound")
    rows = []
    for microbatches in TIMED_MICROBATCHES:
        start = time.perf_counter()
        makespan = tune(costs, TIMED.devices, microbatches)[0].makespan
        seconds = time.perf_counter() - start
        ratio = makespan / bounds(costs, TIMED.devices, microbatches).filled
        row = {"microbatches": microbatches, "published": theirs[str(microbatches)], "seconds": seconds}
        rows.append(row | {"over_filled_bound": ratio})
        table.add_row(str(microbatches), f"{row['published']:.2f}", f"{seconds:.2f}", f"{ratio:.3f}")
    table.caption = "the bound: with fill and drain of the head's device"
    bar = at_most(f"seconds with {TIMED_MICROBATCHES[-1]} micro-batches", LONGEST, rows[-1]["seconds"])
    return Section((table,), (bar,), rows)


def sensitivity() -> Section:
    """How often the tuned plan is still faster than every other when all times are off by some percent."""
    table = make_table(
        f"{DRAWS} draws of times, each off by {SPREAD:.0%} (standard deviation)",
        *("model", "best other", "as planned", "median", "5th percentile", "wins"),
    )
    rows = [_sensitivity(Cell(model, "Medium", 4096)) for model in MODELS]
    for row in rows:
        ratios = (f"{row[name]:.3f}" for name in ("planned", "median", "fifth_percentile"))
        table.add_row(row["cell"], row["rival"], *ratios, f"{row['wins']:.1%}")
    table.caption = "makespan of the best other plan of the draw over that of the tuned one"
    bars = (at_least(f"part won, {row['cell']}", SHARE, row["wins"]) for row in rows)
    return Section((table,), tuple(bars), rows)


def _sensitivity(cell: Cell) -> dict:
    costs = cell_costs(cell)
    plans = named_plans(costs, cell.devices, cell.microbatches)
    tuned = tune(costs, cell.devices, cell.microbatches, memory_model="ideal")[0].plan
    exact = {name: simulate(plan, costs).makespan for name, plan in plans.items()}
    rival = min(exact, key=exact.get)
    drawn = spreads({name: (plan, costs) for name, plan in ({"": tuned} | plans).items()}, SPREAD, DRAWS, 0)
    own = drawn.pop("")
    ratio = np.min(list(drawn.values()), axis=0) / own
    return {
        "cell": str(cell),
        "baselines": sorted(plans),
        "rival": rival,
        "planned": exact[rival] / simulate(tuned, costs).makespan,
        "median": float(np.median(ratio)),
        "fifth_percentile": float(np.quantile(ratio, 0.05)),
        "wins": float(np.mean(ratio > 1)),
    }


def named_plans(costs: CostTable, devices: int, microbatches: int) -> dict[str, Plan]:
    """The plans of all names that take these costs and numbers."""
    plans = {}
    for name in NAMED:
        try:
            plans[name] = named_plan(name, costs, devices, microbatches)
        except ValueError:  # takes other numbers or models, or fits in no way
            continue
    return plans
