"""From a configuration to everything that a run needs before it compiles."""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpipe.costs.analytic import analytic_costs
from jaxpipe.costs.table import CostTable
from jaxpipe.models.code import Codes, trace_model
from jaxpipe.models.families import FAMILIES
from jaxpipe.models.piece import Model
from jaxpipe.planning.plan import Action, Plan
from jaxpipe.planning.tune import GoOn
from jaxpipe.program.arrange import arrange
from jaxpipe.program.choose import lower_by_numbers
from jaxpipe.program.program import Program
from jaxpipe.program.spec import PieceSpec
from jaxpipe.program.verify import verify
from jaxpipe.runtime.executor import make_step
from jaxpipe.runtime.layout import Layout, make_layout
from jaxpipe.runtime.mesh import make_mesh
from jaxpipe.runtime.specs import piece_specs
from jaxpipe.training.config import Config
from jaxpipe.training.plans import choose_plan


@dataclass(frozen=True, eq=False)
class Job:
    """A run, prepared.

    codes, pieces: the traced code of the training step, and what its program was lowered from.
    program, evaluation: the training step, and the forward of the same pieces in the same slots.
    tick_makespan: time of `program` by its recurrence, in the unit of the cost table.
    run_training, run_evaluation: what `make_step` returns for them.
    """

    config: Config
    mesh: Mesh
    model: Model
    costs: CostTable
    plan: Plan
    layout: Layout
    codes: Codes
    pieces: tuple[PieceSpec, ...]
    program: Program
    tick_makespan: float
    evaluation: Program
    run_training: object
    run_evaluation: object


def build_model(config: Config) -> Model:
    """The model that a configuration describes.

    Raises:
      ValueError: when axis `model` does not divide a size that it splits.
    """
    return FAMILIES[config.family][1](config.model, jnp.dtype(config.dtype), config.mesh.model)


def prepare(config: Config, mesh: Mesh | None = None, go_on: GoOn = lambda made, best: True) -> Job:
    """Builds the model, prices it, plans, lowers and verifies. Makes no arrays on the mesh.

    Args:
      mesh: of the configuration's sizes, its devices present or not; None for those that JAX sees first.
      go_on: told about the search for a plan, as `planning.tune.tune` does.

    Raises:
      ValueError: one line about what does not fit together.
    """
    mesh = mesh or make_mesh(config.mesh.stage, config.mesh.data, config.mesh.model)
    model = build_model(config)
    if len(model.pieces) < config.mesh.stage:
        raise ValueError(
            f"field 'mesh.stage' is {config.mesh.stage}; the model has {len(model.pieces)} pieces, "
            f"so expected at most {len(model.pieces)}"
        )
    costs = price(config, model, mesh.abstract_mesh)
    plan = choose_plan(config, costs, tick_times(config, model, mesh.abstract_mesh), go_on)
    codes, pieces, program, makespan, run_training = _program(
        config, model, mesh, costs, plan, plan.recompute
    )
    layout = make_layout(model, program)
    forward = _forward_only(plan)
    _, _, evaluation, _, run_evaluation = _program(
        config, model, mesh, costs, forward, ("forward",) * len(model.pieces)
    )
    return Job(
        config,
        mesh,
        model,
        costs,
        plan,
        layout,
        codes,
        pieces,
        program,
        makespan,
        evaluation,
        run_training(layout),
        run_evaluation(layout),
    )


def price(config: Config, model: Model, mesh) -> CostTable:
    """The analytic cost table of a configuration on its chip; `mesh` may be abstract."""
    dtype = jnp.dtype(config.dtype)
    codes = trace_model(model, mesh, *_sizes(config), ("none",) * len(model.pieces), dtype)
    return analytic_costs(model, codes, config.plan.chip, dtype.itemsize)


def tick_times(config: Config, model: Model, mesh) -> Callable[[Plan, CostTable], float]:
    """A function from plans and costs to times on ticks with one set of permutes; `mesh` may be abstract."""

    def ticks(plan: Plan, costs: CostTable) -> float:
        codes = trace_model(model, mesh, *_sizes(config), plan.recompute, jnp.dtype(config.dtype))
        return arrange(plan, piece_specs(model, codes, plan.recompute), costs)[0].makespan

    return ticks


def _sizes(config: Config) -> tuple[int, int]:
    """Sequences of a micro-batch on one data shard, and their length."""
    parts = config.batch.microbatches * config.mesh.data
    return config.batch.global_batch // parts, config.data.sequence_length


def _program(config: Config, model: Model, mesh: Mesh, costs: CostTable, plan: Plan, policies):
    """Code, pieces, the verified program of a plan, its time, and a function from a layout to its step."""
    dtype = jnp.dtype(config.dtype)
    codes = trace_model(model, mesh.abstract_mesh, *_sizes(config), policies, dtype)
    pieces = tuple(piece_specs(model, codes, policies))
    # Virtual devices wait for all others at each permute, so there patterns gain nothing.
    patterns = config.plan.patterns or (1 if config.plan.chip == "cpu" else 0)
    program, makespan = lower_by_numbers(plan, pieces, costs, config.plan.slots, patterns)
    verify(program, pieces)

    def step(layout: Layout):
        return make_step(model, layout, pieces, codes, program.signature, mesh, dtype)

    return codes, pieces, program, makespan, step


def _forward_only(plan: Plan) -> Plan:
    """The same placement with the forwards alone."""
    rows = [[] for _ in range(plan.devices)]
    for microbatch in range(plan.microbatches):
        for stage, device in enumerate(plan.stage_to_device):
            rows[device].append(Action(stage, "F", microbatch))
    return Plan(
        f"{plan.name}-forward",
        plan.devices,
        plan.microbatches,
        plan.pieces,
        plan.stage_bounds,
        plan.stage_to_device,
        plan.recompute,
        tuple(map(tuple, rows)),
    )
