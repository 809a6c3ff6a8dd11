"""The training state in slots, its update, and its layer-ordered form for checkpoints."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpipe.models.piece import init_params, param_shapes, piece_params
from jaxpipe.runtime.compiler import compiler_options
from jaxpipe.runtime.executor import program_arguments
from jaxpipe.runtime.layout import SlotTree, from_slots, owned, shardings, slot_specs, to_slots
from jaxpipe.training.optimizer import (
    clip_by_norm,
    decay_mask,
    get_moments,
    learning_rate,
    make_optimizer,
    set_moments,
)
from jaxpipe.training.prepare import Job


class TrainState(NamedTuple):
    """The state of a run on its mesh.

    params: master parameters (float32) in slots; optimizer: Optax state shaped like them; step:
    int32[], updates so far.
    """

    params: SlotTree
    optimizer: optax.OptState
    step: jax.Array


def _optimizer(job: Job) -> optax.GradientTransformation:
    shapes = param_shapes(job.model)
    by_kind = {p.kind: decay_mask(piece_params(p, shapes)) for p in job.model.pieces}
    mask = {key: by_kind[key.rsplit(":", 1)[0]] for key, _ in job.layout.placement}
    return make_optimizer(job.config, mask)


def state_shardings(job: Job) -> TrainState:
    """Shardings of the state: parameters and moments over `stage` (and `model`), counters everywhere."""
    params = shardings(job.mesh, slot_specs(job.model, job.layout))
    everywhere = NamedSharding(job.mesh, PartitionSpec())
    abstract = jax.eval_shape(lambda p: to_slots(job.model, job.layout, p), param_shapes(job.model))
    empty = jax.eval_shape(_optimizer(job).init, abstract)
    optimizer = optax.tree_utils.tree_map_params(
        _optimizer(job), lambda _, s: s, empty, params, transform_non_params=lambda _: everywhere
    )
    return TrainState(params, optimizer, everywhere)


def initial_state(job: Job) -> TrainState:
    """The state before the first step, from the configuration's seed."""
    params = init_params(job.model, job.config.seed)
    return jax.jit(functools.partial(_build, job), out_shardings=state_shardings(job))(params)


def abstract_state(job: Job) -> TrainState:
    """Types of the state, with shardings. Makes no arrays, so the mesh and the memory need not exist."""
    types = jax.eval_shape(functools.partial(_build, job), param_shapes(job.model))
    return jax.tree.map(_sharded, types, state_shardings(job))


def _build(job: Job, params) -> TrainState:
    slots = to_slots(job.model, job.layout, params)
    return TrainState(slots, _optimizer(job).init(slots), jnp.int32(0))


def _sharded(t, sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=sharding)


def training_step(job: Job):
    """The jitted training step and the arguments that the plan adds to it: step(state, batch, *arguments).

    See `make_update`, which calls it.
    """
    optimizer, config = _optimizer(job), job.config

    def update(state: TrainState, batch, tables, length, ties, counts):
        scale = 1 / jnp.maximum(jnp.sum(batch["weights"]), 1)
        grads, losses = job.run_training(state.params, batch, tables, length, {"nll": scale}, ties)
        norm = jnp.sqrt(sum(jax.tree.leaves(jax.tree.map(_squares, grads, counts))))
        rate = learning_rate(config, state.step)
        clipped = clip_by_norm(grads, norm, config.optimizer.clip_norm)
        updates, optimizer_state = optimizer.update(clipped, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": losses["nll"] * scale, "grad_norm": norm, "learning_rate": rate}
        return TrainState(params, optimizer_state, state.step + 1), metrics

    everywhere = NamedSharding(job.mesh, PartitionSpec())
    counts = owned(job.model, job.layout, slot_specs(job.model, job.layout))
    arguments = (*program_arguments(job.program, job.model, job.layout), counts)
    shardings_out = state_shardings(job), everywhere
    step = jax.jit(
        update, donate_argnums=0, out_shardings=shardings_out, compiler_options=compiler_options(job.mesh)
    )
    return step, arguments


def make_update(job: Job):
    """The compiled training step: update(state, batch) -> (state, metrics); `state` is donated.

    batch: arrays [micro-batches, sequences, tokens]. metrics: float32 scalars "loss" (nats a token
    over all tokens that count), "grad_norm" before clipping, "learning_rate".
    """
    step, arguments = training_step(job)
    return lambda state, batch: step(state, batch, *arguments)


def _squares(grad: jax.Array, counts: jax.Array) -> jax.Array:
    """Sum of squares over the devices whose copy counts."""
    return jnp.sum(jnp.sum(grad * grad, range(1, grad.ndim)) * counts)


def make_evaluate(job: Job):
    """The compiled forward: evaluate(params, batch) -> (sum of nll, number of tokens that count)."""
    tables, length, ties = program_arguments(job.evaluation, job.model, job.layout)

    @functools.partial(jax.jit, compiler_options=compiler_options(job.mesh))
    def evaluate(params, batch, tables, length, ties):
        _, losses = job.run_evaluation(params, batch, tables, length, {"nll": jnp.float32(1)}, ties)
        return losses["nll"], jnp.sum(batch["weights"])

    return lambda params, batch: evaluate(params, batch, tables, length, ties)


def to_layers(job: Job):
    """A compiled function from the state to a tree in layer order, independent of plan and mesh.

    The tree is {"params", "mu", "nu": {piece: {...}}, "step"}, each array spread over axis `stage`.
    """

    def convert(state: TrainState):
        mu, nu = get_moments(state.optimizer)
        trees = {"params": state.params, "mu": mu, "nu": nu}
        layers = {name: _with_params(from_slots(job.model, job.layout, t)) for name, t in trees.items()}
        return layers | {"step": state.step}

    return jax.jit(convert, out_shardings=layer_shardings(job))


def from_layers(job: Job):
    """The inverse of `to_layers`, on the mesh and layout of this job."""

    def convert(layers):
        empty = {p.name: {} for p in job.model.pieces}
        params, mu, nu = (
            to_slots(job.model, job.layout, empty | layers[name]) for name in ("params", "mu", "nu")
        )
        optimizer = set_moments(_optimizer(job).init(params), mu, nu, layers["step"])
        return TrainState(params, optimizer, layers["step"])

    return jax.jit(convert, out_shardings=state_shardings(job))


def layer_shardings(job: Job) -> dict:
    """Shardings of the layer-ordered tree."""
    spread = jax.tree.map(lambda s: _spread(job.mesh, s.shape), _with_params(param_shapes(job.model)))
    return {"params": spread, "mu": spread, "nu": spread, "step": NamedSharding(job.mesh, PartitionSpec())}


def abstract_layers(job: Job) -> dict:
    """Types of the layer-ordered tree, with shardings: what a checkpoint is restored as."""
    shapes = _with_params(param_shapes(job.model))
    tree = {"params": shapes, "mu": shapes, "nu": shapes, "step": jax.ShapeDtypeStruct((), jnp.int32)}
    return jax.tree.map(_sharded, tree, layer_shardings(job))


def _with_params(tree: dict) -> dict:
    return {name: own for name, own in tree.items() if jax.tree.leaves(own)}


def _spread(mesh, shape) -> NamedSharding:
    """Split along the first dimension that axis `stage` divides, else whole on every device."""
    for i, size in enumerate(shape):
        if size % mesh.shape["stage"] == 0:
            return NamedSharding(mesh, PartitionSpec(*[None] * i, "stage"))
    return NamedSharding(mesh, PartitionSpec())
