"""The exact optimum over all schedules of small plans, as a yardstick for planners.

A constraint model for OR-tools' CP-SAT: a start for each F, I and W; no two actions of a device overlap;
what comes from another device comes later by the time of the message; memory as the ideal model of
`jaxpipe.planning.memory` has it. Every result is proven.

Micro-batches are alike, so some best schedule runs each phase of each stage in the order of the
micro-batches, and only those are searched. Proof: of any schedule call the k-th start of a phase of a
stage micro-batch k. What an action waits for has then been made, since k starts of it need k ends of what it
reads; and memory depends on how many have started and ended, not on which.

B is not tried, as a schedule with I and W right after it is never longer. All micro-batches of a stage run on
its device.

Times on a slow core, with a tight limit of memory (without one they are a tenth): one stage a device, 4
devices, 8 micro-batches 0.5 s; two a device, 2 devices, 6 micro-batches 1 s; 4 devices, 4 micro-batches
0.1 s, 6 up to 20 s. All partitions of 8 pieces over 4 devices, 8 micro-batches, up to 2 s.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

from ortools.sat.python import cp_model

from jaxpipe.costs.table import CostTable
from jaxpipe.planning.plan import Action, Plan
from jaxpipe.planning.stages import StageCost, stage_costs

LIMIT = 60.0
"""Work after which the solver gives up, in its own unit of about a second, so that no clock decides."""


class Optimum(NamedTuple):
    """The least makespan, in the unit of the cost table, and a plan that takes it."""

    makespan: int
    plan: Plan


def best_schedule(
    plan: Plan, costs: CostTable, limits: Sequence[int] | None = None, below: float | None = None
) -> Optimum | None:
    """The plan with the best schedule in place of its own, which is not looked at; None when there is none.

    limits: the most bytes that each device may hold.
    below: only makespans under this one count.

    Raises:
      ValueError: F, I, W of a stage or the time of a message are no integers, or F or I is 0.
      RuntimeError: the solver could not prove its answer in time.
    """
    stages = stage_costs(plan, costs)
    gaps = _gaps(plan, costs, stages)
    _check(stages, gaps)
    least = lower_bound(plan, costs)
    serial = plan.microbatches * (sum(s.F + s.I + s.W for s in stages) + 2 * sum(gaps))
    most = serial if below is None else min(serial, below - 1)
    if least > most:
        return None
    model = cp_model.CpModel()
    makespan = model.new_int_var(int(least), int(most), "makespan")
    runs = _runs(model, plan, stages, int(most))
    for action, run in runs.items():
        model.add(run.end_expr() <= makespan)
        for before, gap in _before(action, gaps):
            model.add(run.start_expr() >= runs[before].end_expr() + gap)
    for device in range(plan.devices):
        own = [a for a in runs if plan.stage_to_device[a.stage] == device]
        model.add_no_overlap(runs[a] for a in own)
        if limits is not None:
            state = sum(stages[s].state_bytes for s in {a.stage for a in own})
            _limit(model, runs, stages, own, int(limits[device] - state), int(most))
    model.minimize(makespan)
    return _solve(model, plan, runs)


def best_plan(plans: Iterable[Plan], costs: CostTable, limits: Sequence[int] | None = None) -> Optimum | None:
    """The best of `best_schedule` over plans, such as all partitions; the first of equals."""
    best = None
    for plan in sorted(plans, key=lambda plan: lower_bound(plan, costs)):
        found = best_schedule(plan, costs, limits, below=best and best.makespan)
        best = found or best
    return best


def blank_plan(
    costs: CostTable, stage_bounds: Sequence[int], devices: Sequence[int], microbatches: int
) -> Plan:
    """A plan without a schedule, and without recompute. devices: of each stage."""
    return Plan(
        name="blank",
        devices=1 + max(devices),
        microbatches=microbatches,
        pieces=tuple(piece.name for piece in costs.pieces),
        stage_bounds=tuple(stage_bounds),
        stage_to_device=tuple(devices),
        recompute=("none",) * len(costs.pieces),
        schedule=(),
    )


def partitions(costs: CostTable, devices: Sequence[int], microbatches: int) -> Iterator[Plan]:
    """Blank plans with every partition of the pieces into as many stages as there are `devices`."""
    count = len(costs.pieces)
    for cuts in combinations(range(1, count), len(devices) - 1):
        yield blank_plan(costs, (0, *cuts, count), devices, microbatches)


def lower_bound(plan: Plan, costs: CostTable) -> float:
    """A makespan that no schedule of the plan's stages beats, whatever the memory.

    A device waits for its first stage's first input. From then on it has all its work to do; and all its
    F and I, after the last of which the gradient still has to get to stage 0, and to its W.
    """
    stages = stage_costs(plan, costs)
    gaps = _gaps(plan, costs, stages)
    head, tail = [0.0], [stages[0].W]
    for stage, gap in enumerate(gaps):
        head.append(head[-1] + stages[stage].F + gap)
        before = tail[-1] + stages[stage].I + gap
        tail.append(max(before, stages[stage + 1].W))
    found = [head[-1] + stages[-1].F + stages[-1].I + tail[-1]]
    for device in range(plan.devices):
        own = [s for s, place in enumerate(plan.stage_to_device) if place == device]
        if own:
            needed = plan.microbatches * sum(stages[s].F + stages[s].I for s in own)
            later = plan.microbatches * sum(stages[s].W for s in own)
            found.append(head[own[0]] + needed + max(later, min(tail[s] for s in own)))
    return max(found)


def _gaps(plan: Plan, costs: CostTable, stages: Sequence[StageCost]) -> list[float]:
    """Time of the message between each stage and the next; 0 on one device."""
    return [
        0 if here == there else costs.link.time(stages[s].output_bytes)
        for s, (here, there) in enumerate(pairwise(plan.stage_to_device))
    ]


def _check(stages: Sequence[StageCost], gaps: Sequence[float]) -> None:
    for s, stage in enumerate(stages):
        for phase, least in (("F", 1), ("I", 1), ("W", 0)):
            if (time := getattr(stage, phase)) != int(time) or time < least:
                raise ValueError(
                    f"{phase} of stage {s} takes {time}; expected an integer of at least {least}"
                )
    for s, gap in enumerate(gaps):
        if gap != int(gap):
            raise ValueError(f"a message from stage {s} to {s + 1} takes {gap}; expected an integer")


def _before(action: Action, gaps: Sequence[float]) -> Iterator[tuple[Action, int]]:
    """What must have ended before an action starts, and how long before."""
    stage, phase, b = action
    if b:
        yield Action(stage, phase, b - 1), 0
    if phase == "F" and stage:
        yield Action(stage - 1, "F", b), int(gaps[stage - 1])
    if phase == "I":
        yield Action(stage, "F", b), 0
        if stage < len(gaps):
            yield Action(stage + 1, "I", b), int(gaps[stage])
    if phase == "W":
        yield Action(stage, "I", b), 0


def _runs(
    model: cp_model.CpModel, plan: Plan, stages: Sequence[StageCost], most: int
) -> dict[Action, cp_model.IntervalVar]:
    """The time in which each action runs."""
    return {
        (action := Action(stage, phase, b)): model.new_fixed_size_interval_var(
            model.new_int_var(0, most, f"start {action}"), int(getattr(stages[stage], phase)), f"run {action}"
        )
        for stage in range(plan.stages)
        for phase in "FIW"
        for b in range(plan.microbatches)
    }


def _limit(
    model: cp_model.CpModel,
    runs: dict[Action, cp_model.IntervalVar],
    stages: Sequence[StageCost],
    own: Sequence[Action],
    room: int,
    most: int,
) -> None:
    """Keeps what one device holds within `room` bytes: from F to W, from F to I, and from I to W."""
    held, sizes = [], []
    for forward in (action for action in own if action.phase == "F"):
        stage = stages[forward.stage]
        through = stage.grad_stash_bytes - stage.made_bytes
        lives = {"FW": through, "FI": stage.stash_bytes - through, "IW": stage.made_bytes}
        for (first, last), size in lives.items():
            if size:
                start = runs[forward._replace(phase=first)].start_expr()
                end = runs[forward._replace(phase=last)].end_expr()
                name = f"{first} to {last} of {forward}"
                length = model.new_int_var(0, most, f"length {name}")
                held.append(model.new_interval_var(start, length, end, f"hold {name}"))
                sizes.append(int(size))
    if room < 0:
        model.add_bool_or([])  # never true
    elif held:
        model.add_cumulative(held, sizes, room)


def _solve(model: cp_model.CpModel, plan: Plan, runs: dict[Action, cp_model.IntervalVar]) -> Optimum | None:
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1  # more would make the schedule found depend on chance
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = LIMIT
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None
    if status != cp_model.OPTIMAL:
        raise RuntimeError(f"no proof for plan {plan.name!r} in {LIMIT:g} units of work; take a smaller one")
    span = {a: (solver.value(run.start_expr()), solver.value(run.end_expr())) for a, run in runs.items()}
    # A W that takes no time comes before what starts at its end.
    rows = [
        sorted((a for a in span if plan.stage_to_device[a.stage] == d), key=span.get)
        for d in range(plan.devices)
    ]
    best = dataclasses.replace(plan, name="exact", schedule=tuple(map(tuple, rows)))
    return Optimum(round(solver.objective_value), best)
