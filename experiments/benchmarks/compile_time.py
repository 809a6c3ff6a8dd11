"""Compile time of the training step against the number of micro-batches.

    python -m experiments.benchmarks.compile_time

The schedule is data of the compiled step, so its compile time should not grow with the micro-batches. Every
compilation starts from a fresh trace, with JAX's persistent cache off. The numbers of micro-batches take
turns, with micro-batches of one shape; the ratio counts lowering and compiling together.
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
FAMILY = flags.DEFINE_enum("family", "nemotron_h", sorted(CONFIGS), "whose tiny configuration is compiled")
STAGES = flags.DEFINE_integer("stages", 4, "pipeline devices", lower_bound=1)
ROUNDS = flags.DEFINE_integer("rounds", 3, "compilations for each number of micro-batches", lower_bound=1)
MICROBATCHES = (8, 64, 256)
TARGET = 1.10
"""What 64 micro-batches may take over 8."""


def main(argv: list[str]) -> None:
    """Prints seconds by number of micro-batches, and their ratios."""
    begin(argv, devices=STAGES.value)
    jax.config.update("jax_enable_compilation_cache", False)
    seconds: dict[int, list[tuple[float, float]]] = {m: [] for m in MICROBATCHES}
    for number in range(ROUNDS.value):
        for microbatches in MICROBATCHES if number % 2 == 0 else MICROBATCHES[::-1]:
            seconds[microbatches].append(measure(config_of(FAMILY.value, STAGES.value, microbatches)))
            lowering, compiling = seconds[microbatches][-1]
            print(
                f"round {number + 1}, {microbatches} micro-batches: {lowering:.2f} + {compiling:.2f} s",
                flush=True,
            )
    whole = {m: spread([sum(pair) for pair in pairs]) for m, pairs in seconds.items()}
    ratios = {m: s.median / whole[MICROBATCHES[0]].median for m, s in whole.items()}
    title = f"{FAMILY.value} on {STAGES.value} devices: medians of {ROUNDS.value} (quartiles)"
    table = make_table(title, "micro-batches", "lowering s", "compiling s", "both s", "ratio")
    for m, pairs in seconds.items():
        parts = (str(spread(column)) for column in zip(*pairs))
        table.add_row(str(m), *parts, str(whole[m]), f"{ratios[m]:.3f}")
    Console().print(table)
    print(f"64 micro-batches over 8: {ratios[64]:.3f}; target at most {TARGET:.2f}")
    write_results({"family": FAMILY.value, "stages": STAGES.value, "seconds": seconds, "ratios": ratios})


def config_of(family: str, stages: int, microbatches: int) -> Config:
    """The tiny configuration with micro-batches of 4 sequences."""
    tree = CONFIGS[family].get_config()
    tree.mesh.stage = stages
    tree.batch.update(global_batch=4 * microbatches, microbatches=microbatches)
    return from_config_dict(tree)


def measure(config: Config) -> tuple[float, float]:
    """Seconds to lower and to compile the training step, from nothing."""
    jax.clear_caches()
    job = prepare(config)
    state = initial_state(job)
    shape = (config.batch.microbatches, 4, config.data.sequence_length)
    batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "segments", "positions")}
    step, arguments = training_step(job)
    began = time.perf_counter()
    lowered = step.lower(state, batch | {"weights": np.ones(shape, np.float32)}, *arguments)
    middle = time.perf_counter()
    lowered.compile()
    return middle - began, time.perf_counter() - middle


if __name__ == "__main__":
    app.run(main)
