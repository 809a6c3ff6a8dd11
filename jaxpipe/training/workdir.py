"""The run folder: what is written there, and whether it belongs to the configuration at hand."""

import json
from pathlib import Path

from jaxpipe.costs.table import save as save_costs
from jaxpipe.planning.interchange import write_csv
from jaxpipe.planning.plan import save as save_plan
from jaxpipe.planning.simulator import Simulation
from jaxpipe.reports.gantt import attention_stages, write_gantt
from jaxpipe.reports.trace import write_trace
from jaxpipe.training.config import Config, differences, to_json
from jaxpipe.training.prepare import Job

FREE_FIELDS = (
    "mesh.",
    "plan.",
    "batch.microbatches",
    "train.log_every",
    "train.eval_every",
    "train.eval_batches",
    "train.checkpoint_every",
    "train.checkpoints_to_keep",
)
"""Fields that may change when a run is resumed: they do not change what is computed."""

FILES = {
    "config.json": "the resolved configuration",
    "costs.json": "predicted time and memory of every piece",
    "plan.json": "partition, placement, recompute policy and schedule",
    "schedule.csv": "the schedule in PyTorch's grammar, one row a device",
    "gantt.svg": "a picture of the plan",
    "trace.json": "the plan for ui.perfetto.dev",
    "metrics.jsonl": "loss, tokens/s and more, one JSON object a line",
    "checkpoints": "the newest states, in layer order",
}
"""What a run folder holds."""


def open_workdir(workdir: Path, config: Config) -> list[str]:
    """Makes the folder, or checks that its run is this configuration's; writes config.json.

    Returns:
      the free fields that differ from the run so far, as lines "field: old -> new".

    Raises:
      ValueError: the folder cannot be written, or belongs to another configuration.
    """
    path, new = workdir / "config.json", to_json(config)
    if workdir.is_file():
        raise ValueError(f"cannot write to workdir {workdir}: it is a file; expected a folder")
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        old = json.loads(path.read_text()) if path.exists() else None
        if old is not None and not isinstance(old, dict):
            raise ValueError(f"{path} is no JSON object; expected what an earlier run wrote there")
        if old is None and any((workdir / "checkpoints").glob("[0-9]*")):
            raise ValueError(
                f"{workdir} holds checkpoints but no config.json, so whose they are cannot be told; "
                "put config.json back, or take another --workdir"
            )
        changed = differences(old, new) if old is not None else []
        others = [line for line in changed if not line.startswith(FREE_FIELDS)]
        if others:
            raise ValueError(
                f"{workdir} belongs to another configuration: {'; '.join(others)}. "
                "Take another --workdir, or the configuration that it was started with"
            )
        # Written aside and renamed, so that a crash leaves the old file or the new one.
        part = path.with_suffix(".json.tmp")
        part.write_text(json.dumps(new, indent=1) + "\n")
        part.rename(path)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}); expected what an earlier run wrote there") from error
    except OSError as error:
        raise ValueError(f"cannot write to workdir {workdir}: {error.strerror}") from error
    return changed


def write_reports(workdir: Path, job: Job, simulation: Simulation) -> list[str]:
    """Writes costs, plan, schedule, picture and trace.

    Returns:
      what is left out, with the reason.
    """
    unit, left_out = job.costs.unit, []
    save_costs(job.costs, workdir / "costs.json")
    save_plan(job.plan, workdir / "plan.json")
    try:
        (workdir / "schedule.csv").write_text(write_csv(job.plan.schedule))
    except ValueError as error:  # PyTorch's grammar has one device a stage, so rotated attention has none
        (workdir / "schedule.csv").unlink(missing_ok=True)
        left_out.append(f"no schedule.csv: {error}")
    title = f"{job.model.name}, {job.plan.name}, predicted for chip {job.config.plan.chip}"
    write_gantt(
        simulation, job.plan, workdir / "gantt.svg", title, unit, attention_stages(job.plan, job.costs)
    )
    write_trace(simulation, workdir / "trace.json", unit)
    return left_out
