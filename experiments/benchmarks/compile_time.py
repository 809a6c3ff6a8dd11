"""Compile time of the training step against the number of micro-batches and of patterns of permutes.

    python -m experiments.benchmarks.compile_time

The schedule is data of the compiled step, so its compile time should not grow with the micro-batches; every
pattern has the dispatch once more. Every compilation starts from a fresh trace, with JAX's persistent cache
off. The variants take turns, with micro-batches of one shape. Lowering and compiling count together, in wall
time and in CPU time of this process, which other work on the machine disturbs less.
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
from jaxpipe.training.state import abstract_state, training_step

CONFIGS = {"llama": llama_tiny, "nemotron_h": nemotron_h_tiny}
FAMILIES = flags.DEFINE_multi_enum(
    "family", sorted(CONFIGS), sorted(CONFIGS), "whose tiny configuration is compiled"
)
STAGES = flags.DEFINE_integer("stages", 4, "pipeline devices", lower_bound=1)
ROUNDS = flags.DEFINE_integer("rounds", 3, "compilations for each number of micro-batches", lower_bound=1)
VARIANTS = ((8, 1), (64, 1), (256, 1), (64, 2), (64, 8))
"""(micro-batches, patterns); ratios are to the first."""
TARGETS = {(64, 1): 1.10, (256, 1): 1.05}


def main(argv: list[str]) -> None:
    """Prints seconds by variant, and their ratios."""
    begin(argv, devices=STAGES.value)
    jax.config.update("jax_enable_compilation_cache", False)
    title = f"training step on {STAGES.value} devices, seconds: medians of {ROUNDS.value} (quartiles)"
    columns = ("family", "micro-batches", "patterns", "wall", "ratio", "CPU", "ratio", "target")
    table = make_table(title, *columns)
    results = {}
    for family in FAMILIES.value:
        rounds = measure_family(family)
        results[family] = []
        for variant, pairs in rounds.items():
            wall, cpu = (spread([pair[i] for pair in pairs]) for i in (0, 1))
            ratios = [
                spread([pair[i] / first[i] for pair, first in zip(pairs, rounds[VARIANTS[0]])]).median
                for i in (0, 1)
            ]
            target = f"{TARGETS[variant]:.2f}" if variant in TARGETS else ""
            shown = str(wall), f"{ratios[0]:.2f}", f"{cpu.median:.3g}", f"{ratios[1]:.2f}"
            table.add_row(family, *map(str, variant), *shown, target)
            row = {
                "wall": wall._asdict(),
                "cpu": cpu._asdict(),
                "wall_ratio": ratios[0],
                "cpu_ratio": ratios[1],
            }
            results[family].append({"microbatches": variant[0], "patterns": variant[1]} | row)
    Console().print(table)
    write_results({"stages": STAGES.value, "families": results})


def measure_family(family: str) -> dict[tuple[int, int], list[tuple[float, float]]]:
    """Variant -> (wall, CPU) seconds of every round."""
    seconds = {variant: [] for variant in VARIANTS}
    for number in range(ROUNDS.value):
        for variant in VARIANTS if number % 2 == 0 else VARIANTS[::-1]:
            seconds[variant].append(measure(config_of(family, STAGES.value, *variant)))
            (microbatches, patterns), (wall, cpu) = variant, seconds[variant][-1]
            what = f"{family}, {microbatches} micro-batches, {patterns} patterns"
            print(f"{what}: wall {wall:.2f} s, CPU {cpu:.2f} s", flush=True)
    return seconds


def config_of(family: str, stages: int, microbatches: int, patterns: int) -> Config:
    """The tiny configuration with micro-batches of 4 sequences."""
    tree = CONFIGS[family].get_config()
    tree.mesh.stage = stages
    tree.plan.patterns = patterns
    tree.batch.update(global_batch=4 * microbatches, microbatches=microbatches)
    return from_config_dict(tree)


def measure(config: Config) -> tuple[float, float]:
    """Wall and CPU seconds to lower and compile the training step, from nothing.

    Raises:
      RuntimeError: the program has another number of patterns than was asked for.
    """
    jax.clear_caches()
    job = prepare(config)
    if (found := len(job.program.signature.patterns)) != config.plan.patterns:
        raise RuntimeError(f"the program has {found} patterns; {config.plan.patterns} were asked for")
    state = abstract_state(job)
    shape = (config.batch.microbatches, 4, config.data.sequence_length)
    batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "segments", "positions")}
    step, arguments = training_step(job)
    wall, cpu = time.perf_counter(), time.process_time()
    step.lower(state, batch | {"weights": np.ones(shape, np.float32)}, *arguments).compile()
    return time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    app.run(main)
