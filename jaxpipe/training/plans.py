"""The plan that a configuration asks for: by name, searched for, or read from a file."""

from collections.abc import Callable
from pathlib import Path

from jaxpipe.costs.table import CostTable
from jaxpipe.planning.build import make_plan
from jaxpipe.planning.judge_plan import floating_stages
from jaxpipe.planning.named import NAMED, named_plan
from jaxpipe.planning.plan import Plan, check, load
from jaxpipe.planning.schedules import SCHEDULES
from jaxpipe.planning.simulator import simulate
from jaxpipe.planning.stages import stage_costs
from jaxpipe.planning.tune import GoOn, tune
from jaxpipe.training.config import TUNED, Config, recompute_policies


def choose_plan(
    config: Config, costs: CostTable, ticks: Callable[[Plan, CostTable], float], go_on: GoOn
) -> Plan:
    """The plan of a configuration.

    ticks: the time of a plan on ticks, which decides between plans that are nearly as fast.
    go_on: told about a search under way.

    Raises:
      ValueError: one line about what does not fit together.
    """
    schedule, devices, microbatches = config.plan.schedule, config.mesh.stage, config.batch.microbatches
    if schedule in SCHEDULES:
        policies = recompute_policies(config.plan.recompute, [piece.kind for piece in costs.pieces])
        return make_plan(costs, devices, microbatches, schedule, config.plan.partition, policies)
    if schedule in NAMED:
        return _in_field(config, lambda: named_plan(schedule, costs, devices, microbatches))
    if schedule == TUNED:
        found = _in_field(config, lambda: tune(costs, devices, microbatches, go_on=go_on))
        return min(found, key=lambda tuned: ticks(tuned.plan, tuned.costs)).plan
    return _in_field(config, lambda: _from_file(Path(schedule), costs, devices, microbatches))


def _from_file(path: Path, costs: CostTable, devices: int, microbatches: int) -> Plan:
    plan = load(path)
    for name, found, wanted in (
        ("devices", plan.devices, devices),
        ("microbatches", plan.microbatches, microbatches),
    ):
        if found != wanted:
            raise ValueError(f"field {name!r} of the plan is {found}; expected {wanted}")
    stage_costs(plan, costs)  # says which piece differs
    check(plan, floating_stages(plan, costs))
    simulate(plan, costs)  # says where it deadlocks
    return plan


def _in_field(config: Config, make: Callable[[], Plan]) -> Plan:
    """What `make` returns; its complaint names the field that asked for it."""
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"field 'plan.schedule' is {config.plan.schedule!r}: {error}") from error
