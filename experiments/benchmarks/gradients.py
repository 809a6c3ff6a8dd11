"""Gradients through the pipeline against `jax.grad` of the sequential model, over a grid of plans.

    python -m experiments.benchmarks.gradients

Both families on 1, 2, 4 and 8 devices: every schedule; the balanced partition and two random ones; 2, 4, 7
and 8 micro-batches; with and without recompute: up to 120 plans for each family and number of devices, and
for 2 stages x 2 data x 2 model. Plans of a row share one compiled step. Everything is float32; an error is
the largest max|found - expected| / max|expected| of any parameter.
"""

import functools
import itertools
import sys
import time
from dataclasses import replace
from random import Random
from typing import NamedTuple

from absl import app, flags
from rich.console import Console

from experiments.benchmarks.output import begin, make_table, write_results
from experiments.benchmarks.pipelines import (
    SIZES,
    Traced,
    compiled_step,
    lively_params,
    lowered,
    norm_error,
    random_batch,
    run,
    sequential,
    share,
    small_model,
    trace,
    worst_error,
)
from jaxpipe.costs.analytic import analytic_costs
from jaxpipe.planning.build import make_plan
from jaxpipe.planning.plan import POLICIES, Plan, check
from jaxpipe.planning.schedules import SCHEDULES
from jaxpipe.runtime.mesh import make_mesh

FAMILIES = flags.DEFINE_multi_enum("family", sorted(SIZES), sorted(SIZES), "families of models")
MESHES = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (8, 1, 1), (2, 2, 2)]
MICROBATCHES = (2, 4, 7, 8)
SEQUENCES, LENGTH = 4, 16
TOLERANCE = 1e-5


class Row(NamedTuple):
    """The plans of one family on one mesh; errors are the worst over them.

    loss, parameter, norm: of the loss, of the worst parameter, of all parameters together.
    """

    family: str
    mesh: tuple[int, int, int]
    plans: int
    loss: float
    parameter: float
    norm: float
    seconds: float


def main(argv: list[str]) -> None:
    """Measures row by row and prints a table; exits with 1 when an error is above the tolerance."""
    begin(argv, devices=8)
    title = "worst relative errors (mesh: stage x data x model)"
    table = make_table(title, "family", "mesh", "plans", "loss", "a parameter", "all", "time")
    rows = []
    for family, mesh in itertools.product(FAMILIES.value, MESHES):
        row = measure(family, mesh)
        rows.append(row)
        errors = (f"{e:.1e}" for e in (row.loss, row.parameter, row.norm))
        table.add_row(family, "x".join(map(str, mesh)), str(row.plans), *errors, f"{row.seconds:.0f} s")
        print(f"{family} on {mesh}: {row.plans} plans, worst error {row.parameter:.1e}", flush=True)
    worst = max(max(row.loss, row.parameter, row.norm) for row in rows)
    Console().print(table)
    print(f"worst relative error {worst:.2e}, {'within' if worst <= TOLERANCE else 'ABOVE'} {TOLERANCE:.0e}")
    write_results({"tolerance": TOLERANCE, "worst": worst, "rows": [row._asdict() for row in rows]})
    sys.exit(worst > TOLERANCE)


def measure(family: str, mesh: tuple[int, int, int]) -> Row:
    """Runs the plans of one row on one compiled step."""
    began = time.perf_counter()
    traced = trace(small_model(family, tp=mesh[2]), make_mesh(*mesh), POLICIES, SEQUENCES, LENGTH)
    plans = make_plans(traced, mesh[0])
    programs = share([lowered(traced, plan) for plan in plans])
    step, errors = compiled_step(traced, programs[0]), []
    for plan, program in zip(plans, programs):
        batch = random_batch(0, plan.microbatches, SEQUENCES, LENGTH)
        loss, grads = run(traced, step, program, lively_params(family), batch)
        wanted_loss, wanted = expected(family, plan.microbatches)
        errors.append((abs(loss / wanted_loss - 1), worst_error(grads, wanted), norm_error(grads, wanted)))
    worst = [float(max(column)) for column in zip(*errors)]
    return Row(family, mesh, len(plans), *worst, time.perf_counter() - began)


def make_plans(traced: Traced, devices: int) -> list[Plan]:
    """Schedules x partitions x micro-batches x recompute policies, without repetitions."""
    costs = analytic_costs(traced.model, traced.codes, "cpu", traced.dtype.itemsize)
    count, random, plans = len(traced.model.pieces), Random(devices), []
    uneven = [(0, *sorted(random.sample(range(1, count), devices - 1)), count) for _ in range(2)]
    for schedule, microbatches, policy in itertools.product(SCHEDULES, MICROBATCHES, POLICIES):
        plan = make_plan(costs, devices, microbatches, schedule, "balanced", policy)
        plans += [plan, *(replace(plan, stage_bounds=bounds) for bounds in uneven)]
    for plan in plans:
        check(plan)
    return list(dict.fromkeys(plans))


@functools.cache
def expected(family: str, microbatches: int) -> tuple[float, dict]:
    """Loss and gradients of the sequential model."""
    return _sequential(family)(lively_params(family), random_batch(0, microbatches, SEQUENCES, LENGTH))


@functools.cache
def _sequential(family: str):
    return sequential(small_model(family))


if __name__ == "__main__":
    app.run(main)
