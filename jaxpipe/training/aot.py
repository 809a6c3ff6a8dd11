"""The training step compiled for devices that need not exist, and what it came to."""

import os
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpipe.models.piece import example_batch
from jaxpipe.planning.simulator import simulate
from jaxpipe.program.program import Op, stacked_kinds
from jaxpipe.reports.aot import OpRow, library_calls
from jaxpipe.reports.tables import dispatch_line
from jaxpipe.runtime.aot import OPTIONS
from jaxpipe.runtime.compiler import compiler_options
from jaxpipe.runtime.memory import check_fits, distinct_ops, op_workspace, predicted_bytes
from jaxpipe.runtime.tick_loop import TickLoop, read_tick_loop, watched_types
from jaxpipe.training.prepare import Job
from jaxpipe.training.state import abstract_state, training_step


class Compiled(NamedTuple):
    """A training step as compiled, in bytes on one device and seconds.

    cpu_seconds: of all threads while it compiled, which other work on the machine disturbs less.
    predicted_bytes: by part, "workspace" being that of the largest op.
    peak_bytes: arguments, results and temporaries of the whole step together.
    patterns: sets of permutes, each with its own copy of the dispatch.
    stacked: kinds whose parameter slots share ops.
    ops: in the order of the signature.
    """

    lower_seconds: float
    compile_seconds: float
    cpu_seconds: float
    predicted_bytes: dict[str, int]
    peak_bytes: int
    patterns: int
    stacked: tuple[str, ...]
    loop: TickLoop
    ops: tuple[OpRow, ...]


def compile_ahead(job: Job, chip: str, report: Callable[[str], None]) -> Compiled:
    """Compiles the training step of a job on absent devices, each of its kinds of ops alone first.

    Args:
      chip: what the devices are, for the size of their memory.
      report: called with lines on what is being done.

    Raises:
      ValueError: the step cannot fit the chip's memory; known before it is compiled.
    """
    options = compiler_options(job.mesh) | OPTIONS
    state, batch = abstract_state(job), abstract_batch(job)
    step, arguments = training_step(job)
    signature, dtype = job.program.signature, jnp.dtype(job.config.dtype)
    parts = predicted_bytes(job.codes, signature, state.params, state.optimizer, (batch, arguments), dtype)
    check_fits(parts, chip)
    specs = {(s.kind, s.policy): s for s in job.pieces}
    workspaces = {}
    for op in distinct_ops(signature):
        name = op_name(op)
        report(f"compiling {name} alone ...")
        needed = op_workspace(job.mesh, job.codes, specs[op.kind, op.policy], op, options)
        workspaces[name] = max(needed, workspaces.get(name, 0))
    parts["workspace"] = max(workspaces.values())
    check_fits(parts, chip)
    report(f"compiling the training step: {len(signature.ops)} ops ...")
    began = time.perf_counter()
    with jax.set_mesh(job.mesh):
        lowered = step.lower(state, batch, *arguments)
    lowered_at, used_before = time.perf_counter(), _cpu_seconds()
    compiled = lowered.compile(compiler_options=options)
    seconds = lowered_at - began, time.perf_counter() - lowered_at, _cpu_seconds() - used_before
    used = compiled.memory_analysis()
    peak = used.argument_size_in_bytes + used.temp_size_in_bytes
    peak += used.output_size_in_bytes - used.alias_size_in_bytes
    loop = read_tick_loop(compiled.as_text(), len(signature.ops), watched_types(job.codes, signature))
    names = [op_name(op) for op in signature.ops]
    rows = tuple(OpRow(name, *code, workspaces[name]) for name, code in zip(names, loop.ops))
    patterns = len(signature.patterns)
    return Compiled(*seconds, parts, peak, patterns, stacked_kinds(signature), loop, rows)


def _cpu_seconds() -> float:
    """CPU time of this process and of the assemblers that it has run."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def op_name(op: Op) -> str:
    """Kind and phase as in "mlp B", with the recompute policy where there is one."""
    return f"{op.kind}{' full' if op.policy == 'full' else ''} {op.phase}"


def to_json(result: Compiled) -> dict:
    """The report as a JSON object."""
    loop = result.loop
    return {
        "lower_seconds": result.lower_seconds,
        "compile_seconds": result.compile_seconds,
        "compile_cpu_seconds": result.cpu_seconds,
        "peak_bytes": result.peak_bytes,
        "predicted_bytes": result.predicted_bytes | {"all": sum(result.predicted_bytes.values())},
        "patterns": result.patterns,
        "stacked_kinds": list(result.stacked),
        "copies": loop.copies,
        "weight_slices": loop.slices,
        "weight_updates": loop.updates,
        "permutes": {"asynchronous": loop.asynchronous, "synchronous": loop.synchronous},
        "ops": [row._asdict() for row in result.ops],
    }


def plan_times(job: Job) -> dict:
    """The plan's name, its makespan as its dependencies allow and as its program has it, and their unit."""
    return {
        "name": job.plan.name,
        "makespan": simulate(job.plan, job.costs).makespan,
        "tick_makespan": job.tick_makespan,
        "unit": job.costs.unit,
    }


def summary(result: Compiled) -> list[str]:
    """The report in a few lines, without what the tables say."""
    loop = result.loop
    return [
        f"lowered in {result.lower_seconds:.1f} s, compiled in {result.compile_seconds:.1f} s "
        f"({result.cpu_seconds:.1f} s of CPU time)",
        dispatch_line(len(result.ops), result.patterns, result.stacked),
        f"kernels of libraries: {_counted(library_calls(result.ops))}",
        f"permutes beside the dispatch: {loop.asynchronous} of {loop.asynchronous + loop.synchronous}",
        f"copies of register files, weights or gradients in the tick loop: {_counted(loop.copies)}",
        f"slices of whole weights or gradients there: {_counted(loop.slices)} read, "
        f"{_counted(loop.updates)} written",
    ]


def _counted(found: dict[str, int]) -> str:
    each = ", ".join(f"{count} of {kind}" for kind, count in found.items())
    return f"{sum(found.values())} ({each})" if found else "0"


def abstract_batch(job: Job) -> dict[str, jax.ShapeDtypeStruct]:
    """Types of a step's batch [micro-batches, sequences, tokens], split over axis `data`."""
    sharding = NamedSharding(job.mesh, PartitionSpec(None, "data"))
    parts = job.config.batch.microbatches
    example = jax.eval_shape(
        lambda: example_batch(job.config.batch.global_batch // parts, job.config.data.sequence_length)
    )
    return {
        n: jax.ShapeDtypeStruct((parts, *t.shape), t.dtype, sharding=sharding) for n, t in example.items()
    }
