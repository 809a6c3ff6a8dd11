"""Compile time of the training step against the number of micro-batches and of patterns of permutes.

    python -m experiments.benchmarks.compile_time

The schedule is data of the compiled step, so its compile time should not grow with the micro-batches; every
pattern has the dispatch once more. Every compilation starts from a fresh trace, with JAX's persistent cache
off. The variants take turns, forth and back in every round, with micro-batches of one shape. Lowering and
compiling count together, in wall time and in CPU time of this process, which other work on the machine
disturbs less. Lines are those of the lowered step, which do not depend on the machine.
"""

import time
from typing import NamedTuple

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
ROUNDS = flags.DEFINE_integer("rounds", 2, "rounds, of two compilations of each variant", lower_bound=1)
VARIANTS = ((8, 1), (64, 1), (256, 1), (64, 2), (64, 8))
"""(micro-batches, patterns); ratios are to the first."""
TARGETS = {(64, 1): 1.10, (256, 1): 1.05}


def main(argv: list[str]) -> None:
    """Prints seconds by variant, and their ratios."""
    begin(argv, devices=STAGES.value)
    jax.config.update("jax_enable_compilation_cache", False)
    title = f"training step on {STAGES.value} devices, seconds: medians of {ROUNDS.value} (quartiles)"
    columns = ("family", "micro-batches", "patterns", "lines", "wall", "ratio", "CPU", "ratio", "target")
    table = make_table(title, *columns)
    results = {}
    for family in FAMILIES.value:
        rounds = measure_family(family)
        results[family] = []
        for variant, found in rounds.items():
            wall, cpu = (spread([one[i] for one in found]) for i in (0, 1))
            ratios = [
                spread([one[i] / first[i] for one, first in zip(found, rounds[VARIANTS[0]])]).median
                for i in (0, 1)
            ]
            lines = found[0].lines
            target = f"{TARGETS[variant]:.2f}" if variant in TARGETS else ""
            shown = str(wall), f"{ratios[0]:.2f}", f"{cpu.median:.3g}", f"{ratios[1]:.2f}"
            table.add_row(family, *map(str, variant), str(lines), *shown, target)
            row = {
                "lines": lines,
                "wall": wall._asdict(),
                "cpu": cpu._asdict(),
                "wall_ratio": ratios[0],
                "cpu_ratio": ratios[1],
            }
            results[family].append({"microbatches": variant[0], "patterns": variant[1]} | row)
    Console().print(table)
    write_results({"stages": STAGES.value, "families": results})


class Compilation(NamedTuple):
    """One compilation, seconds; lines: of the lowered step."""

    wall: float
    cpu: float
    lines: int


def measure_family(family: str) -> dict[tuple[int, int], list[Compilation]]:
    """Variant -> its mean of every round."""
    measure(config_of(family, STAGES.value, *VARIANTS[0]))  # the first in a process is slower
    found = {variant: [] for variant in VARIANTS}
    for _ in range(ROUNDS.value):
        twice = {variant: [] for variant in VARIANTS}
        for variant in (*VARIANTS, *VARIANTS[::-1]):
            one = measure(config_of(family, STAGES.value, *variant))
            twice[variant].append(one)
            what = f"{family}, {variant[0]} micro-batches, {variant[1]} patterns"
            print(f"{what}: wall {one.wall:.2f} s, CPU {one.cpu:.2f} s", flush=True)
        for variant, (forth, back) in twice.items():
            mean = (forth.wall + back.wall) / 2, (forth.cpu + back.cpu) / 2
            found[variant].append(Compilation(*mean, forth.lines))
    return found


def config_of(family: str, stages: int, microbatches: int, patterns: int) -> Config:
    """The tiny configuration with micro-batches of 4 sequences."""
    tree = CONFIGS[family].get_config()
    tree.mesh.stage = stages
    tree.plan.patterns = patterns
    tree.batch.update(global_batch=4 * microbatches, microbatches=microbatches)
    return from_config_dict(tree)


def measure(config: Config) -> Compilation:
    """Lowers and compiles the training step, from nothing.

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
    lowered = step.lower(state, batch | {"weights": np.ones(shape, np.float32)}, *arguments)
    lowered.compile()
    seconds = time.perf_counter() - wall, time.process_time() - cpu
    return Compilation(*seconds, len(lowered.as_text().splitlines()))


if __name__ == "__main__":
    app.run(main)
