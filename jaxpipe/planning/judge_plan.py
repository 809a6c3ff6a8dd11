"""Judges a plan as `judge` does a sheet: is it right, how long does it take, and how much memory."""

from itertools import pairwise

from jaxpipe.costs.table import CostTable
from jaxpipe.planning.judge import Verdict
from jaxpipe.planning.plan import Plan, check
from jaxpipe.planning.simulator import Simulation, simulate
from jaxpipe.planning.stages import CORE, stage_costs


def judge_plan(plan: Plan, costs: CostTable, memory_model: str) -> tuple[Verdict, tuple[float, ...] | None]:
    """The verdict, and the peak bytes of every device by one of `memory.MEMORY_MODELS`; None when wrong.

    Partition, placement and recompute are the plan's. The verdict names no places, since a plan has no cells.

    Raises:
      ValueError: the cost table is not about the pieces of the plan, or the model of memory is unknown.
    """
    try:
        check(plan, range(plan.stages))  # where the stages stand is looked at once the pieces are known
    except ValueError as error:
        return Verdict(str(error)), None
    stage_costs(plan, costs)  # raises for another table
    try:
        check(plan, floating_stages(plan, costs))
        simulation = simulate(plan, costs, memory_model=memory_model)
    except ValueError as error:
        return Verdict(str(error)), None
    return _verdict(plan, simulation), simulation.peak_bytes


def floating_stages(plan: Plan, costs: CostTable) -> tuple[int, ...]:
    """The stages that hold nothing but attention cores without parameters; they may run anywhere."""
    return tuple(
        stage
        for stage, (start, stop) in enumerate(pairwise(plan.stage_bounds))
        if all(piece.kind == CORE and not piece.param_bytes for piece in costs.pieces[start:stop])
    )


def _verdict(plan: Plan, simulation: Simulation) -> Verdict:
    homes: list[set[int]] = [set() for _ in range(plan.stages)]
    for device, row in enumerate(plan.schedule):
        for action in row:
            homes[action.stage].add(device)
    return Verdict(
        error=None,
        microbatches=plan.microbatches,
        chains=1,
        stage_to_device=plan.stage_to_device,
        floating=tuple(stage for stage, devices in enumerate(homes) if len(devices) > 1),
        makespan=simulation.makespan,
        busy=simulation.busy,
        bubble_fraction=simulation.bubble_fraction,
        internal_bubble=simulation.internal_bubble,
        internal_idle=simulation.internal_idle,
        peak_in_flight=simulation.peak_in_flight,
        events=simulation.events,
        stage_bounds=plan.stage_bounds,
    )
