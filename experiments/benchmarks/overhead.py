"""What the pipeline's machinery costs on one device, where it cannot gain anything.

    python -m experiments.benchmarks.overhead [--width=2]

The training step on one device against the step that one would write by hand without a pipeline: a scan
over the micro-batches of `jax.value_and_grad` of the sequential model, then the same optimizer. Both donate
their state. A round is four steps: one side, the other twice, the first again, so that what drifts steadily
on the machine cancels; the ratio is taken round by round, of wall time and of CPU time of this process.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from rich.console import Console

from experiments.benchmarks.output import begin, make_table, spread, write_results
from experiments.configs import llama_tiny, nemotron_h_tiny
from jaxpipe.models.code import compute_copy
from jaxpipe.models.piece import apply_model, init_params
from jaxpipe.training.config import Config, from_config_dict
from jaxpipe.training.optimizer import clip_by_norm, decay_mask, make_optimizer
from jaxpipe.training.prepare import Job, prepare
from jaxpipe.training.state import initial_state, make_update

CONFIGS = {"llama": llama_tiny, "nemotron_h": nemotron_h_tiny}
FAMILIES = flags.DEFINE_multi_enum(
    "family", sorted(CONFIGS), sorted(CONFIGS), "whose tiny configuration is run"
)
ROUNDS = flags.DEFINE_integer("rounds", 9, "timed rounds, of two steps of each side", lower_bound=1)
WIDTH = flags.DEFINE_integer("width", 1, "multiplies hidden size, heads and MLPs", lower_bound=1)
WIDENED = ("hidden", "heads", "kv_heads", "mlp_hidden", "mamba_heads")
TARGET = 1.10
"""What the pipeline's step may take over the one written by hand."""


def main(argv: list[str]) -> None:
    """Prints seconds a step of both sides, and their ratio."""
    begin(argv, devices=1)
    title = f"one training step on one device: medians of {ROUNDS.value} rounds (quartiles)"
    table = make_table(title, "family", "pipeline s", "by hand s", "wall ratio", "CPU ratio")
    results = {}
    for family in FAMILIES.value:
        rounds = measure(config_of(family, WIDTH.value), ROUNDS.value)
        wall, cpu = ({side: [pair[i] for pair in rounds[side]] for side in rounds} for i in (0, 1))
        ratios = [spread([a / b for a, b in zip(*sides.values())]) for sides in (wall, cpu)]
        columns = [*map(spread, wall.values()), *ratios]
        table.add_row(family, *map(str, columns))
        names = ("wall", "cpu", "wall_ratio", "cpu_ratio")
        results[family] = dict(zip(names, (wall, cpu, *(ratio._asdict() for ratio in ratios))))
        print(f"{family}: ratio {ratios[0]}; target at most {TARGET:.2f}", flush=True)
    Console().print(table)
    write_results(results)


def config_of(family: str, width: int = 1) -> Config:
    """The tiny configuration on one device, `width` times as wide."""
    tree = CONFIGS[family].get_config()
    tree.mesh.stage = 1
    tree.model.update({name: width * tree.model[name] for name in WIDENED if name in tree.model})
    return from_config_dict(tree)


def measure(config: Config, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(wall, CPU) seconds a step of both sides in every round.

    Raises:
      RuntimeError: the two sides do not compute the same losses.
    """
    job, batch = prepare(config), random_batch(config)
    hand_step, hand_state = by_hand(job)
    steps = {"pipeline": make_update(job), "by hand": hand_step}
    states = {"pipeline": initial_state(job), "by hand": hand_state}
    seconds, losses = {name: [] for name in steps}, {name: [] for name in steps}
    for number in range(rounds + 1):
        first, second = steps if number % 2 else reversed(steps)
        used = {name: np.zeros(2) for name in steps}
        for name in (first, second, second, first):
            began = time.perf_counter(), time.process_time()
            states[name], metrics = jax.block_until_ready(steps[name](states[name], batch))
            used[name] += time.perf_counter() - began[0], time.process_time() - began[1]
            losses[name].append(float(metrics["loss"]))
        for name in steps:
            seconds[name].append(tuple((used[name] / 2).tolist()))
    if not np.allclose(losses["pipeline"], losses["by hand"], rtol=1e-3):
        raise RuntimeError(f"the two sides compute different losses: {losses}")
    return {name: values[1:] for name, values in seconds.items()}  # the first round compiles


def by_hand(job: Job):
    """A training step without a pipeline, and its first state (params, optimizer state)."""
    config, params = job.config, init_params(job.model, job.config.seed)
    optimizer = make_optimizer(config, decay_mask(params))

    def step(state, batch):
        params, optimizer_state = state
        scale = 1 / jnp.sum(batch["weights"])

        def loss_of(params, microbatch):
            copies = compute_copy(params, jnp.dtype(config.dtype))
            return apply_model(job.model, copies, microbatch)["nll"] * scale

        def visit(sums, microbatch):
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss_of)(params, microbatch)), None

        zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
        (loss, grads), _ = jax.lax.scan(visit, zeros, batch)
        norm = optax.global_norm(grads)
        clipped = clip_by_norm(grads, norm, config.optimizer.clip_norm)
        updates, optimizer_state = optimizer.update(clipped, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), {"loss": loss, "grad_norm": norm}

    return jax.jit(step, donate_argnums=0), (params, optimizer.init(params))


def random_batch(config: Config) -> dict[str, jax.Array]:
    """Random bytes, [micro-batches, sequences, tokens], one document a sequence."""
    rng, microbatches = np.random.default_rng(0), config.batch.microbatches
    shape = (microbatches, config.batch.global_batch // microbatches, config.data.sequence_length)
    return {
        "tokens": jnp.asarray(rng.integers(0, 256, shape, np.int32)),
        "targets": jnp.asarray(rng.integers(0, 256, shape, np.int32)),
        "segments": jnp.zeros(shape, jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(shape[-1], dtype=jnp.int32), shape),
        "weights": jnp.ones(shape, jnp.float32),
    }


if __name__ == "__main__":
    app.run(main)
