"""The training run: prepare, show, compile, resume, loop, compare."""

import logging
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from jaxpipe.models.piece import param_shapes
from jaxpipe.planning.build import rivals
from jaxpipe.planning.simulator import lower_bound, simulate
from jaxpipe.planning.tune import usual_evaluations
from jaxpipe.program.arrange import arrange
from jaxpipe.program.program import stacked_kinds
from jaxpipe.reports.progress import search_progress
from jaxpipe.reports.tables import dispatch_line, piece_rows, pieces_table, plan_row, plans_table
from jaxpipe.reports.units import format_duration
from jaxpipe.runtime.mesh import describe
from jaxpipe.training import ngrams
from jaxpipe.training.checkpoints import Checkpoints
from jaxpipe.training.config import Config, recompute_policies
from jaxpipe.training.corpus import load_corpus
from jaxpipe.training.data import HostBatch, heldout_batches, training_batches
from jaxpipe.training.metrics import MetricsWriter, Progress
from jaxpipe.training.prepare import Job, prepare
from jaxpipe.training.state import (
    abstract_layers,
    from_layers,
    initial_state,
    make_evaluate,
    make_update,
    to_layers,
)
from jaxpipe.training.workdir import FILES, open_workdir, write_reports

logger = logging.getLogger(__name__)


class NonFiniteError(RuntimeError):
    """The loss or the gradient stopped being finite."""


class Result(NamedTuple):
    """step: steps done; heldout: nats a token at the end, None when the run was stopped before it.

    signal: the signal that stopped it, None when none did.
    """

    step: int
    heldout: float | None
    signal: int | None = None


def train(
    config: Config, workdir: Path | str, console: Console, on_step: Callable[[int, dict], None] | None = None
) -> Result:
    """Trains until `train.steps`, from the newest checkpoint in `workdir` if there is one.

    Args:
      on_step: called after every step with its number (from 1) and metrics.

    Raises:
      ValueError: one line about what is wrong with configuration, data or folder.
      NonFiniteError: loss or gradient is NaN or infinite; the last good checkpoint is kept.
    """
    workdir = Path(workdir)
    data = config.data
    corpus = load_corpus(data.corpus, data.suffixes, data.holdout_every, data.sequence_length)
    evaluations = usual_evaluations(config.mesh.stage, config.batch.microbatches)
    job = prepare(config, go_on=search_progress(console, evaluations, float("inf"), "s"))
    for line in open_workdir(workdir, config):
        console.out(f"changed since this run began: {line}", highlight=False)
    _show(job, workdir, console)
    heldout = heldout_batches(
        corpus.heldout, data.sequence_length, config.batch.global_batch, config.train.eval_batches
    )
    with Checkpoints(workdir / "checkpoints", config.train.checkpoints_to_keep) as checkpoints:
        restored = checkpoints.restore_latest(abstract_layers(job))
        if restored is None:
            state = initial_state(job)
        else:
            state = from_layers(job)(restored[1])
            console.out(f"resuming after step {restored[0]}", highlight=False)
        start = int(state.step)
        batches = training_batches(corpus.train, data.sequence_length, config.batch.global_batch, config.seed)
        with MetricsWriter(workdir / "metrics.jsonl", start) as metrics, _stop_signals(console) as stopped:
            state, step, loss = _loop(
                job, state, batches, heldout, checkpoints, metrics, console, stopped, on_step
            )
        if step < config.train.steps:
            console.out(f"stopped after step {step}; the same command goes on from there", highlight=False)
            return Result(step, None, stopped[0])
        if loss is None:  # the run was complete before
            loss = _evaluate(job, make_evaluate(job), state, heldout)
    console.print()
    tables = ngrams.nats_per_byte(ngrams.count(corpus.train), heldout)
    for name, value in (tables | {"this model": loss}).items():
        console.out(f"held-out loss  {name:<10} {value:.4f} nats a byte", highlight=False)
    console.print()
    for name, meaning in FILES.items():
        console.out(f"{workdir / name}: {meaning}", highlight=False)
    return Result(step, loss)


def _loop(job: Job, state, batches, heldout, checkpoints, metrics, console, stopped, on_step):
    """The state after the last step, the number of that step, and its held-out loss if it was measured."""
    settings, config = job.config.train, job.config
    update, evaluate, layers = make_update(job), make_evaluate(job), to_layers(job)
    step = int(state.step)
    tokens = config.batch.global_batch * config.data.sequence_length
    saved, seconds, loss = step, [], None
    if step < settings.steps:
        console.out("compiling the training step ...", highlight=False)
    while step < settings.steps and not stopped:
        began = time.perf_counter()
        state, values = update(state, _device_batch(job, batches[step]))
        values = {name: float(value) for name, value in values.items()}
        elapsed = time.perf_counter() - began
        step += 1
        if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
            raise NonFiniteError(
                f"step {step}: loss is {values['loss']}, gradient norm {values['grad_norm']}; "
                f"the last good checkpoint is that of step {saved}" + (" (none)" if saved == 0 else "")
            )
        first = not seconds
        seconds.append(elapsed)
        if first:
            console.out(f"first step, compilation included: {elapsed:.1f} s", highlight=False)
        if step % settings.log_every == 0 or step == settings.steps:
            recent = seconds[1:][-settings.log_every :]  # the first includes the compilation
            mean = sum(recent) / len(recent) if recent else None
            console.out(str(Progress(step, settings.steps, values["loss"], mean, tokens)), highlight=False)
        values |= {"step_seconds": elapsed, "tokens_per_second": tokens / elapsed}
        last, loss = step == settings.steps, None
        if step % settings.eval_every == 0 or last:
            values["heldout_loss"] = loss = _evaluate(job, evaluate, state, heldout)
            console.out(f"step {step}/{settings.steps} held-out loss {loss:.4f}", highlight=False)
        metrics.write(step, **values)
        if on_step:
            on_step(step, values)
        if step % settings.checkpoint_every == 0 or last or stopped:
            checkpoints.save(step, layers(state))
            saved = step
    if saved != step:  # the signal came after the last look at it
        checkpoints.save(step, layers(state))
    checkpoints.wait()
    return state, step, loss


def _evaluate(job: Job, evaluate, state, batches: list[HostBatch]) -> float:
    """Held-out loss in nats a token."""
    sums = [evaluate(state.params, _device_batch(job, batch)) for batch in batches]
    losses, counts = (sum(float(v) for v in column) for column in zip(*sums))
    return losses / counts


def _device_batch(job: Job, batch: HostBatch) -> dict[str, jax.Array]:
    """The batch [G, S] as [micro-batches, G / micro-batches, S], split over axis `data`."""
    sharding = NamedSharding(job.mesh, PartitionSpec(None, "data"))
    parts = job.config.batch.microbatches
    return {
        name: jax.device_put(np.reshape(value, (parts, -1, value.shape[-1])), sharding)
        for name, value in batch.items()
    }


def _show(job: Job, workdir: Path, console: Console) -> None:
    """Prints devices, pieces and the plan beside its rivals; writes the plan's reports."""
    costs, config = job.costs, job.config
    devices, microbatches = job.plan.devices, job.plan.microbatches
    counts = {
        name: sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(own))
        for name, own in param_shapes(job.model).items()
    }
    console.out(describe(job.mesh), highlight=False)
    console.out(f"\nPieces of {job.model.name}, times predicted for chip {config.plan.chip}", highlight=False)
    console.print(pieces_table(piece_rows(costs, counts), costs.unit))
    policies = recompute_policies(config.plan.recompute, [p.kind for p in job.model.pieces])
    bound = lower_bound(costs, devices, microbatches)
    plans = {plan.name: plan for plan in (*rivals(costs, devices, microbatches, policies), job.plan)}
    simulations = {name: simulate(plan, costs) for name, plan in plans.items()}
    patterns = len(job.program.signature.patterns)
    ticks = {
        name: arrange(plan, job.pieces, costs, patterns)[0].makespan
        for name, plan in plans.items()
        if plan is not job.plan
    } | {job.plan.name: job.tick_makespan}
    rows = [plan_row(name, simulations[name], ticks[name], bound) for name in plans]
    console.out(
        f"\nPlans for {devices} devices and {microbatches} micro-batches; "
        f"no plan can take less than {format_duration(bound, costs.unit)} (lower bound)",
        highlight=False,
    )
    console.print(plans_table(rows, costs.unit, job.plan.name, costs.memory_limit_bytes))
    signature = job.program.signature
    console.out(f"compiled from {dispatch_line(len(signature.ops), patterns, stacked_kinds(signature))}")
    for line in write_reports(workdir, job, simulations[job.plan.name]):
        console.out(line, highlight=False)


@contextmanager
def _stop_signals(console: Console) -> Iterator[list[int]]:
    """Collects SIGTERM and SIGINT while the loop runs, so that it ends after the step with a checkpoint.

    A second signal acts as it did before, for those who cannot wait.
    """
    caught: list[int] = []

    def catch(number, _):
        caught.append(number)
        console.out("stopping after this step, or after compiling; once more stops at once", highlight=False)
        signal.signal(number, old[number])

    old = {number: signal.signal(number, catch) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield caught
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
