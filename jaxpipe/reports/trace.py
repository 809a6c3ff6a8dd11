"""Timelines as Chrome trace JSON, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

Format: "Trace Event Format", complete events ("X"), counters ("C") and metadata ("M"); times in
microseconds.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from jaxpipe.planning.plan import Event
from jaxpipe.planning.simulator import Simulation
from jaxpipe.reports.units import unit_seconds

PHASE_NAMES = {"F": "forward", "I": "input gradient", "W": "weight gradient", "B": "backward"}


def event_entries(
    events: Sequence[Sequence[Event]], unit: str, process: str = "planned", process_id: int = 0
) -> list[dict]:
    """Trace entries of one process: a thread for each device and an entry for each action.

    Predicted and measured events of one step can be shown together, as two processes.

    unit: unit of the event times, "s", "ms" or "us"; one "unit" is shown as a microsecond.

    Raises:
      ValueError: when the unit is unknown.
    """
    scale = _microseconds(unit)
    entries = [_metadata("process_name", process_id, 0, process)]
    for device, row in enumerate(events):
        entries.append(_metadata("thread_name", process_id, device, f"device {device}"))
        for event in row:
            stage, phase, microbatch = event.action
            entries.append(
                {
                    "name": str(event.action),
                    "cat": PHASE_NAMES[phase],
                    "ph": "X",
                    "pid": process_id,
                    "tid": device,
                    "ts": event.start * scale,
                    "dur": (event.end - event.start) * scale,
                    "args": {"stage": stage, "phase": PHASE_NAMES[phase], "microbatch": microbatch},
                }
            )
    return entries


def memory_entries(memory, unit: str, process_id: int = 0) -> list[dict]:
    """Counters of the bytes that each device holds; `memory` as in `simulator.Simulation`.

    Of several steps at one time the largest is shown, so that no peak is lost.
    """
    scale = _microseconds(unit)
    entries = []
    for device, steps in enumerate(memory):
        largest: dict[float, float] = {}
        for time, size in steps:
            largest[time] = max(size, largest.get(time, 0.0))
        last_time, last_size = steps[-1]
        largest[last_time] = last_size
        for time, size in largest.items():
            entries.append(
                {
                    "name": f"memory of device {device}",
                    "ph": "C",
                    "pid": process_id,
                    "ts": time * scale,
                    "args": {"bytes": size},
                }
            )
    return entries


def simulation_trace(simulation: Simulation, unit: str) -> dict:
    """The whole trace of a simulation, ready for `json.dump`."""
    entries = event_entries(simulation.events, unit) + memory_entries(simulation.memory, unit)
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def write_trace(simulation: Simulation, path: Path | str, unit: str) -> None:
    """Writes `simulation_trace` as JSON; `unit` is that of the cost table."""
    Path(path).write_text(json.dumps(simulation_trace(simulation, unit)) + "\n")


def _metadata(kind: str, process_id: int, thread: int, name: str) -> dict:
    return {"name": kind, "ph": "M", "pid": process_id, "tid": thread, "args": {"name": name}}


def _microseconds(unit: str) -> float:
    """Microseconds in one unit of a cost table."""
    return 1.0 if unit == "unit" else unit_seconds(unit) * 1e6
