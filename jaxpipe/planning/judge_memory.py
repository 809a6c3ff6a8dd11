"""Memory of a schedule that `judge` found valid. Apart from it, since the models of memory need Numba."""

from dataclasses import replace

import numpy as np

from jaxpipe.costs.table import CostTable
from jaxpipe.planning.engine import encode
from jaxpipe.planning.interchange import Sheet
from jaxpipe.planning.judge import Verdict
from jaxpipe.planning.memory import MEMORY_MODELS, memory_timelines
from jaxpipe.planning.padded import padded_bytes
from jaxpipe.planning.plan import Plan
from jaxpipe.planning.stages import stage_costs


def peak_bytes(sheet: Sheet, verdict: Verdict, costs: CostTable, memory_model: str) -> tuple[float, ...]:
    """The most bytes that each device holds at once, by one of `memory.MEMORY_MODELS`.

    verdict: what `judge` said of the sheet with these costs.
    Every chain of a bidirectional pipeline holds the parameters of the whole model.

    Raises:
      ValueError: for an unknown model of memory, and when a stage on several devices has parameters.
    """
    if memory_model not in MEMORY_MODELS:
        raise ValueError(f"unknown memory model {memory_model!r}; known: {', '.join(MEMORY_MODELS)}")
    plan, table = _unrolled(sheet, verdict, costs)
    stages, rows = stage_costs(plan, table), encode(plan.schedule)
    for stage in verdict.floating:
        if stages[stage].state_bytes:
            raise ValueError(
                f"stage {stage} runs on several devices and has parameters; its memory cannot be told"
            )
    if memory_model == "padded":
        return (padded_bytes(plan, table, rows),) * plan.devices
    events = [event for row in verdict.events for event in row]
    start, end = (np.array([getattr(event, name) for event in events]) for name in ("start", "end"))
    timelines = memory_timelines(plan, stages, rows, start, end)
    return tuple(max(size for _, size in steps) for steps in timelines)


def _unrolled(sheet: Sheet, verdict: Verdict, costs: CostTable) -> tuple[Plan, CostTable]:
    """A plan whose line of pieces is that of all chains one after the other, and its cost table."""
    chains, count = verdict.chains, len(costs.pieces)
    pieces = [replace(p, name=f"{p.name}, copy {c}") for c in range(chains) for p in costs.pieces]
    plan = Plan(
        name="judged",
        devices=len(sheet.rows),
        microbatches=verdict.microbatches,
        pieces=tuple(piece.name for piece in pieces),
        stage_bounds=(0, *(c * count + bound for c in range(chains) for bound in verdict.stage_bounds[1:])),
        stage_to_device=verdict.stage_to_device,
        recompute=("none",) * len(pieces),
        schedule=sheet.schedule,
    )
    return plan, replace(costs, pieces=tuple(pieces))
