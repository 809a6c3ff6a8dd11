"""The planner for a 7B model as sequences grow, beside every plan by name.

Pipeline devices are nodes of 8 GPUs, as in `helix`.
"""

import dataclasses

from experiments.benchmarks import helix
from experiments.benchmarks.output import make_table
from experiments.benchmarks.planner_cells import named_plans
from experiments.benchmarks.planner_section import ROUNDING, Bar, Section
from jaxpipe.costs.table import CostTable
from jaxpipe.planning.plan import Plan
from jaxpipe.planning.rotated import rotated_plans
from jaxpipe.planning.simulator import simulate
from jaxpipe.planning.tune import tune

LENGTHS = tuple(2**k * 1024 for k in range(2, 8))
CHIPS = ("h20", "h200")
BANDWIDTH = 50e9
"""Bytes a second that a GPU sends to the next pipeline device: 400 Gb/s."""
PADDED = 128 * 1024
"""At this length the plans of one program for all devices are looked at, too, which take more memory."""
NUMBERS = helix.DEVICES, helix.MICROBATCHES


def long() -> Section:
    """A 7B model with 4K to 128K tokens a micro-batch, on 8 devices of 8 GPUs, 16 micro-batches."""
    table = make_table(
        "seconds a step, of plans that fit in memory",
        *(
            "chip",
            "tokens",
            "memory",
            "tuned",
            "attention",
            "rotated",
            "at home",
            "of these the best by name",
        ),
    )
    cases = [(chip, length, "ideal") for chip in CHIPS for length in LENGTHS]
    rows = [_compare(*case) for case in (*cases, *((chip, PADDED, "padded") for chip in CHIPS))]
    for row in rows:
        seconds = (_seconds(row[where]) for where in ("rotated", "at home"))
        tuned = f"{row['tuned']:.3f}", row["attention"]
        table.add_row(row["chip"], f"{row['length'] // 1024}K", row["memory"], *tuned, *seconds, row["rival"])
    table.caption = (
        "tuned: by the search alone; rotated, at home: the best other plans, of all names and of the rotated "
        "ones with recompute fitted to the memory"
    )
    slower = [_case(row) for row in rows if row["tuned"] > ROUNDING * min(row["rotated"], row["at home"])]
    bar = Bar("tuned never slower than these, rotated or not", ", ".join(slower) or "it is not", not slower)
    return Section((table,), (bar,), rows)


def price(length: int, chip: str) -> CostTable:
    """Costs in seconds, with the network between nodes."""
    costs = helix.price(helix.MODEL, length, helix.DEVICES, helix.GPUS, chip)
    return dataclasses.replace(costs, link=dataclasses.replace(costs.link, bytes_per_unit=BANDWIDTH))


def is_rotated(plan: Plan) -> bool:
    """Whether an action stands on another device than its stage's."""
    homes = plan.stage_to_device
    return any(homes[action.stage] != device for device, row in enumerate(plan.schedule) for action in row)


def _compare(chip: str, length: int, memory: str) -> dict:
    costs = price(length, chip)
    plans = named_plans(costs, *NUMBERS)
    own = {f"rotated {i}": plan for i, plan in enumerate(rotated_plans(costs, *NUMBERS, True, True))}
    fitting = {
        name: (made.makespan, is_rotated(plan))
        for name, plan in (plans | own).items()
        if max((made := simulate(plan, costs, memory_model=memory)).peak_bytes) <= costs.memory_limit_bytes
    }
    rival = min(plans.keys() & fitting.keys(), key=lambda name: fitting[name][0])
    tuned = tune(costs, *NUMBERS, memory_model=memory)[0]
    best = {
        where: min((time for time, rotated in fitting.values() if rotated == here), default=float("inf"))
        for where, here in (("rotated", True), ("at home", False))
    }
    return {
        "chip": chip,
        "length": length,
        "memory": memory,
        "tuned": tuned.makespan,
        "attention": "rotated" if is_rotated(tuned.plan) else "at home",
        **best,
        "rival": rival,
        "over_rival": fitting[rival][0] / tuned.makespan,
    }


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < float("inf") else "-"


def _case(row: dict) -> str:
    return f"{row['chip']} {row['length']} {row['memory']}"
