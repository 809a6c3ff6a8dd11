"""Plans by name beside each other: judged, as a table, as JSON, and the files of one of them."""

import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from jaxpipe.costs.table import CostTable
from jaxpipe.planning import plan as plans
from jaxpipe.planning.build import check_sizes
from jaxpipe.planning.helix import condition
from jaxpipe.planning.interchange import write_csv
from jaxpipe.planning.named import named_plan
from jaxpipe.planning.partition import check_counts
from jaxpipe.planning.plan import Plan
from jaxpipe.planning.simulator import Simulation, lower_bound, simulate
from jaxpipe.planning.tune import GoOn, tune
from jaxpipe.planning.warm import warm_schedule
from jaxpipe.reports.gantt import attention_stages, write_gantt
from jaxpipe.reports.trace import write_trace
from jaxpipe.reports.units import format_bytes, format_duration

Ticks = Callable[[Plan, CostTable], float]
"""The makespan of a plan on ticks, with the costs that it is about."""

TUNED = "tuned"
"""Name of the plan that is searched for."""

FILES = ("plan.json", "schedule.csv", "gantt.svg", "trace.json")
"""What `write_plan` writes of a plan."""


class Problem(NamedTuple):
    """What plans are made for, and what they are measured by.

    lower_bound: as `simulator.lower_bound`.
    memory_limit_bytes: of a device; None for no limit.
    memory_model: "padded" or "ideal", as in `planning.memory`.
    """

    costs: CostTable
    devices: int
    microbatches: int
    lower_bound: float
    memory_limit_bytes: float | None
    memory_model: str


def make_problem(
    costs: CostTable, devices: int, microbatches: int, memory_limit_bytes: float | None, memory_model: str
) -> Problem:
    """The problem; without a memory limit that of the cost table counts.

    Raises:
      ValueError: there are more devices than pieces, or more micro-batches than can be planned.
    """
    check_counts(len(costs.pieces), devices)
    check_sizes(devices, microbatches)
    limit = costs.memory_limit_bytes if memory_limit_bytes is None else memory_limit_bytes
    bound = lower_bound(costs, devices, microbatches)
    costs = replace(costs, memory_limit_bytes=limit)  # some schedules are made for a limit
    return Problem(costs, devices, microbatches, bound, limit, memory_model)


class Judged(NamedTuple):
    """A plan and what it comes to, in the unit of the cost table.

    costs: what the plan is about; where a vocabulary is split, those of the shards.
    search_seconds: time that it took to make the plan, without compiling what makes it.
    simulation, tick_makespan: None where the schedule cannot run.
    fault: why the plan is not valid; empty where it is.
    """

    plan: Plan
    costs: CostTable
    search_seconds: float
    simulation: Simulation | None
    tick_makespan: float | None
    fault: str = ""


def make_judged(name: str, problem: Problem, ticks: Ticks) -> Judged:
    """Makes the plan of a name and judges it.

    Raises:
      ValueError: as `named_plan`.
    """
    warm_schedule(name)
    began = time.perf_counter()
    plan = named_plan(name, problem.costs, problem.devices, problem.microbatches)
    return judge(plan, time.perf_counter() - began, problem, ticks)


def make_tuned(
    problem: Problem,
    ticks: Ticks,
    words: Collection[str],
    evaluations: int | None,
    seed: int,
    given: Collection[Plan],
    go_on: GoOn,
) -> Judged:
    """Searches for a plan and judges it: of those nearly as fast as the best the fastest on ticks.

    The arguments are those of `tune`. Call `warm_search` before, or the time is that of compiling, too.

    Raises:
      ValueError: as `tune`.
    """
    began = time.perf_counter()
    found = tune(
        problem.costs,
        problem.devices,
        problem.microbatches,
        words,
        problem.memory_model,
        evaluations,
        seed,
        tuple(given),
        go_on,
    )
    chosen = min(found, key=lambda tuned: ticks(tuned.plan, tuned.costs))
    seconds = time.perf_counter() - began
    return judge(chosen.plan, seconds, problem._replace(costs=chosen.costs), ticks)


def judge(plan: Plan, search_seconds: float, problem: Problem, ticks: Ticks) -> Judged:
    """Simulates a plan, puts it on ticks, and looks at its memory."""
    costs, limit = problem.costs, problem.memory_limit_bytes
    try:
        simulation = simulate(plan, costs, memory_model=problem.memory_model)
    except ValueError as error:
        return Judged(plan, costs, search_seconds, None, None, str(error))
    over = limit is not None and max(simulation.peak_bytes) > limit
    fault = "above the memory limit" if over else ""
    return Judged(plan, costs, search_seconds, simulation, ticks(plan, costs), fault)


def best(judged: Mapping[str, Judged]) -> str | None:
    """The name of the fastest valid plan; of equals the one with least time on ticks, then memory."""
    valid = [name for name, found in judged.items() if not found.fault]
    return min(valid, key=lambda name: _rank(judged[name]), default=None)


def _rank(found: Judged) -> tuple[float, ...]:
    # Rounded: sums of the same times in another order differ in their last digits.
    times = (found.simulation.makespan, found.tick_makespan)
    return (*(float(f"{value:.9g}") for value in times), max(found.simulation.peak_bytes))


def misfit(found: Judged, problem: Problem) -> str:
    """How far a plan is above the memory limit; empty where it is not."""
    if not found.fault:
        return ""
    peak, limit = max(found.simulation.peak_bytes), problem.memory_limit_bytes
    return (
        f"does not fit: its fullest device holds {format_bytes(peak)}, "
        f"{peak / limit:.3g} times the limit of {format_bytes(limit)}"
    )


def to_json(problem: Problem, judged: Mapping[str, Judged], refused: Mapping[str, str]) -> dict:
    """The report as a JSON object; what a plan that cannot run does not have is null.

    refused: name -> why there is no plan.
    """
    return {
        "devices": problem.devices,
        "microbatches": problem.microbatches,
        "unit": problem.costs.unit,
        "lower_bound": problem.lower_bound,
        "memory_limit_bytes": problem.memory_limit_bytes,
        "memory_model": problem.memory_model,
        "plans": {name: _entry(found) for name, found in judged.items()},
        "refused": dict(refused),
    }


def _entry(found: Judged) -> dict:
    s = found.simulation
    return {
        "makespan": s and s.makespan,
        "tick_makespan": found.tick_makespan,
        "bubble_fraction": s and s.bubble_fraction,
        "internal_bubble": s and s.internal_bubble,
        "peak_stash": s and max(s.peak_in_flight),
        "peak_bytes": s and max(s.peak_bytes),
        "search_seconds": found.search_seconds,
        "valid": not found.fault,
    }


def report_table(problem: Problem, judged: Mapping[str, Judged], chosen: str | None) -> Table:
    """Plans side by side, the fastest first and those that are not valid last. chosen: the one to mark."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column("plan", overflow="fold")
    for name in ("makespan", "ticks", "bubble", "inside", "stash", "memory", "/bound"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in sorted(judged, key=lambda n: (bool(judged[n].fault), _order(judged[n]))):
        table.add_row(
            *_row(name, judged[name], problem, name == chosen), style="bold" if name == chosen else ""
        )
    return table


def _order(found: Judged) -> tuple[float, ...]:
    return _rank(found) if found.simulation else (float("inf"),)


def _row(name: str, found: Judged, problem: Problem, marked: bool) -> list[str | Text]:
    title, unit, s = f"{'>' if marked else ' '} {name}", problem.costs.unit, found.simulation
    if not s:
        return [title, *[Text("-", style="red")] * 7]
    return [
        title,
        format_duration(s.makespan, unit),
        format_duration(found.tick_makespan, unit),
        f"{s.bubble_fraction:.1%}",
        f"{s.internal_bubble:.1%}",
        str(max(s.peak_in_flight)),
        Text(format_bytes(max(s.peak_bytes)), style="red" if found.fault else ""),
        f"{s.makespan / problem.lower_bound:.3f}" if problem.lower_bound else "-",
    ]


def legend(problem: Problem) -> list[str]:
    """Lines below the table: what its columns hold."""
    return [
        "ticks: makespan where devices meet at the same permutes in every tick",
        "bubble: idle share of devices × makespan; inside: of that, what is neither",
        "before a device's first action nor after its last",
        "stash: most (stage, micro-batch) pairs in flight on a device",
        f"memory: of the fullest device, {problem.memory_model}; /bound: makespan over lower bound",
    ]


def heading(problem: Problem) -> list[str]:
    """Lines above the table: the numbers, the lower bound and the memory limit."""
    limit = problem.memory_limit_bytes
    return [
        f"Plans for {problem.devices} devices and {problem.microbatches} micro-batches of "
        f"{len(problem.costs.pieces)} pieces",
        f"lower bound: {format_duration(problem.lower_bound, problem.costs.unit)}; no plan can take less",
        "memory limit: none" if limit is None else f"memory limit: {format_bytes(limit)} a device",
    ]


def remarks(problem: Problem, judged: Mapping[str, Judged], refused: Mapping[str, str]) -> list[str]:
    """Lines below that: why plans are not valid, or not there; where HelixPipe pays."""
    lines = [f"{name} cannot run: {found.fault}" for name, found in judged.items() if not found.simulation]
    over = [name for name, found in judged.items() if found.simulation and found.fault]
    lines += [f"not valid, above the memory limit: {', '.join(over)}"] if over else []
    lines += [f"no plan for {name}: {reason}" for name, reason in refused.items()]
    if any(name.startswith("helix") for name in judged):
        lines.append(condition(problem.costs))
    return lines


def write_report(
    folder: Path, problem: Problem, judged: Mapping[str, Judged], refused: Mapping[str, str]
) -> None:
    """Writes report.json."""
    data = to_json(problem, judged, refused)
    (folder / "report.json").write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")


def write_plan(folder: Path, found: Judged, problem: Problem, title: str) -> list[str]:
    """Writes FILES of a plan that runs.

    title: of the picture, before the plan's name.

    Returns:
      what is left out, with the reason: schedules that PyTorch's CSV cannot express have none. One that an
        earlier plan left there is removed.
    """
    plan, costs, left_out = found.plan, found.costs, []
    plans.save(plan, folder / "plan.json")
    try:
        (folder / "schedule.csv").write_text(write_csv(plan.schedule))
    except ValueError as error:
        (folder / "schedule.csv").unlink(missing_ok=True)
        left_out.append(f"no schedule.csv: {error}")
    write_gantt(
        found.simulation,
        plan,
        folder / "gantt.svg",
        f"{title}, {plan.name}",
        costs.unit,
        attention_stages(plan, costs),
        problem.memory_limit_bytes,
    )
    write_trace(found.simulation, folder / "trace.json", costs.unit)
    return left_out
