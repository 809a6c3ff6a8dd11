"""Compile time of the training step against the number of micro-batches.

    python -m experiments.benchmarks.compile_time

The schedule is data of the compiled step, so its compile time should not grow with the micro-batches. Every
compilation starts from a fresh trace, with JAX's persistent cache off. The numbers of micro-batches take
turns, with micro-batches of one shape. Lowering and compiling count together, in wall time and in CPU time of
this process, which other work on the machine disturbs less.
"""

import time

import jax
import numpy as np
from absl import app, flags
from rich.console import Console

from experiments.benchmarks.output import begin, make_table, spread, write_results
from experiments.configs import llama_tiny, nemotron_h_tiny
from jaxpipe.training.config import Config, from_config_dict
from jaxpipe.training.prepare import prepare
from jaxpipe.training.state import initial_state, training_step

CONFIGS = {"llama": llama_tiny, "nemotron_h": nemotron_h_tiny}
FAMILIES = flags.DEFINE_multi_enum(
    "family", sorted(CONFIGS), sorted(CONFIGS), "whose tiny configuration is compiled"
)
STAGES = flags.DEFINE_integer("stages", 4, "pipeline devices", lower_bound=1)
ROUNDS = flags.DEFINE_integer("rounds", 3, "compilations for each number of micro-batches", lower_bound=1)
MICROBATCHES = (8, 64, 256)
TARGET = 1.10
"""What 64 micro-batches may take over 8."""


def main(argv: list[str]) -> None:
    """Prints seconds by number of micro-batches, and their ratios."""
    begin(argv, devices=STAGES.value)
    jax.config.update("jax_enable_compilation_cache", False)
    title = f"training step on {STAGES.value} devices, seconds: medians of {ROUNDS.value} (quartiles)"
    table = make_table(title, "family", "micro-batches", "wall", "over 8", "CPU", "over 8")
    results = {}
    for family in FAMILIES.value:
        rounds = measure_family(family)
        wall, cpu = ({m: spread([pair[i] for pair in pairs]) for m, pairs in rounds.items()} for i in (0, 1))
        ratios = [
            {m: s.median / times[MICROBATCHES[0]].median for m, s in times.items()} for times in (wall, cpu)
        ]
        for m in MICROBATCHES:
            shown = str(wall[m]), f"{ratios[0][m]:.3f}", f"{cpu[m].median:.3g}", f"{ratios[1][m]:.3f}"
            table.add_row(family, str(m), *shown)
        results[family] = {"wall_cpu_seconds": rounds, "wall_ratios": ratios[0], "cpu_ratios": ratios[1]}
    Console().print(table)
    for family, result in results.items():
        found = f"wall {result['wall_ratios'][64]:.3f}, CPU {result['cpu_ratios'][64]:.3f}"
        print(f"{family}: 64 micro-batches over 8: {found}; target at most {TARGET:.2f}")
    write_results({"stages": STAGES.value, "families": results})


def measure_family(family: str) -> dict[int, list[tuple[float, float]]]:
    """Micro-batches -> (wall, CPU) seconds of every round."""
    seconds = {m: [] for m in MICROBATCHES}
    for number in range(ROUNDS.value):
        for microbatches in MICROBATCHES if number % 2 == 0 else MICROBATCHES[::-1]:
            seconds[microbatches].append(measure(config_of(family, STAGES.value, microbatches)))
            wall, cpu = seconds[microbatches][-1]
            print(f"{family}, {microbatches} micro-batches: wall {wall:.2f} s, CPU {cpu:.2f} s", flush=True)
    return seconds


def config_of(family: str, stages: int, microbatches: int) -> Config:
    """The tiny configuration with micro-batches of 4 sequences."""
    tree = CONFIGS[family].get_config()
    tree.mesh.stage = stages
    tree.batch.update(global_batch=4 * microbatches, microbatches=microbatches)
    return from_config_dict(tree)


def measure(config: Config) -> tuple[float, float]:
    """Wall and CPU seconds to lower and compile the training step, from nothing."""
    jax.clear_caches()
    job = prepare(config)
    state = initial_state(job)
    shape = (config.batch.microbatches, 4, config.data.sequence_length)
    batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "segments", "positions")}
    step, arguments = training_step(job)
    wall, cpu = time.perf_counter(), time.process_time()
    step.lower(state, batch | {"weights": np.ones(shape, np.float32)}, *arguments).compile()
    return time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    app.run(main)
