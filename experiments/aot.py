"""Compiles the training step of a configuration for GPUs that are not here, and reports what it came to.

    python -m experiments.aot --config=experiments/configs/llama_8b.py --topology=1x1x8 --chip=h200

Needs no GPU, but the packages of requirements-aot.txt; `make aot` puts them in .venv-aot, so that
.venv-aot/bin/python runs it. Fields are overridden as in --config.mesh.stage=4.
"""

import json
import sys
import time
from pathlib import Path

from absl import app, flags, logging

from experiments.flags import define_config, parse, resolve

CONFIG = define_config()
TOPOLOGY = flags.DEFINE_string(
    "topology", None, "partitions x hosts x GPUs of a host, as in 1x1x8", required=True
)
CHIP = flags.DEFINE_string("chip", None, "what to compile for: h100 or h200", required=True)
JSON = flags.DEFINE_string("json", None, "file for the report as one JSON object")


def main(argv: list[str]) -> None:
    """Resolves the configuration, compiles, prints the report."""
    if len(argv) > 1:
        sys.exit(f"aot: unexpected argument {argv[1]!r}; flags start with --")
    config = resolve(CONFIG.value)
    import jax
    from rich.console import Console

    from jaxpipe.costs.chips import CHIPS
    from jaxpipe.reports.aot import memory_table, ops_table
    from jaxpipe.reports.units import format_bytes, format_duration
    from jaxpipe.runtime.aot import absent_mesh
    from jaxpipe.training.aot import compile_ahead, plan_times, summary, to_json
    from jaxpipe.training.config import to_json as config_json
    from jaxpipe.training.prepare import prepare

    if JSON.value:
        try:
            Path(JSON.value).open("a").close()
        except OSError as error:
            sys.exit(f"aot: cannot write --json={JSON.value}: {error.strerror}; expected a file")
    logging.set_verbosity(logging.WARNING)
    # GPUs that may be here are of no use, and without one the CUDA plugin complains.
    jax.config.update("jax_platforms", "cpu")
    began, console, sizes = time.perf_counter(), Console(), config.mesh

    def report(line: str) -> None:
        console.out(f"{time.perf_counter() - began:6.1f} s  {line}", highlight=False)

    try:
        mesh = absent_mesh(CHIP.value, TOPOLOGY.value, sizes.stage, sizes.data, sizes.model)
        if config.plan.chip != CHIP.value:
            report(f"the plan is made for field 'plan.chip', {config.plan.chip}; compiling for {CHIP.value}")
        report("tracing, planning and verifying ...")
        job = prepare(config, mesh)
        plan = plan_times(job)
        result = compile_ahead(job, CHIP.value, report)
    except (ValueError, ModuleNotFoundError) as error:
        sys.exit(f"aot: {error}")
    console.print()
    console.print(ops_table(result.ops))
    console.print(memory_table(result.predicted_bytes, result.peak_bytes))
    capacity = CHIPS[CHIP.value].memory_bytes
    times = [format_duration(plan[name], plan["unit"]) for name in ("makespan", "tick_makespan")]
    console.out(f"memory of chip {CHIP.value}: {format_bytes(capacity)}", highlight=False)
    console.out(f"plan {plan['name']}: {times[0]} predicted, {times[1]} on ticks", highlight=False)
    for line in summary(result):
        console.out(line, highlight=False)
    if JSON.value:
        made = {"chip": CHIP.value, "topology": TOPOLOGY.value, "jax": jax.__version__}
        made |= {"memory_bytes": capacity, "config": config_json(config), "plan": plan}
        Path(JSON.value).write_text(json.dumps(made | to_json(result), indent=1) + "\n")


if __name__ == "__main__":
    app.run(main, flags_parser=parse)
