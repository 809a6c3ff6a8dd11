"""Gantt charts of simulated plans, with the memory of each device below."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jaxpipe.planning.plan import Event, Plan
from jaxpipe.planning.simulator import Simulation
from jaxpipe.reports.trace import PHASE_NAMES
from jaxpipe.reports.units import format_bytes, format_duration, unit_seconds

# Okabe and Ito (2008): told apart under the common colour vision deficiencies.
COLORS = {"F": "#56B4E9", "B": "#E69F00", "I": "#CC79A7", "W": "#009E73"}
IDLE = "#E4E4E4"
MEMORY = "#8A6FA8"
WIDTH, LEFT, RIGHT = 12.0, 0.85, 0.95  # inches: figure, left and right margin
ROW_HEIGHT = 0.78  # of the distance between rows
LABEL_POINTS = 7.0


def write_gantt(simulation: Simulation, plan: Plan, path: Path | str, title: str, unit: str) -> None:
    """Draws what each device does and, when the cost table knows bytes, what it holds.

    Rows are devices; numbers in the boxes are micro-batches; stages that share a device differ in
    lightness; grey is idle. The suffix of `path` chooses the format (SVG is meant). The same input
    gives the same bytes.

    unit: time unit of the cost table.

    Raises:
      ValueError: when `unit` is unknown.
    """
    scale, axis_unit = _axis_unit(simulation.makespan, unit)
    subtitle = (
        f"makespan {format_duration(simulation.makespan, unit)}, bubble {simulation.bubble_fraction:.1%} of "
        f"{plan.devices} devices × makespan, {plan.microbatches} micro-batches"
    )
    with_memory = max(simulation.peak_bytes) > 0
    row = 0.34 if plan.devices <= 8 else 0.24
    heights = [row * plan.devices, 0.75 * row * plan.devices if with_memory else 0.0]
    top, gap, bottom = 0.95, 0.35, 0.55
    height = top + heights[0] + bottom + (gap + heights[1] if with_memory else 0.0)
    style = {"svg.fonttype": "none", "svg.hashsalt": "jaxpipe", "font.size": 9.0}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(WIDTH, height))
        inner = (WIDTH - LEFT - RIGHT) / WIDTH
        gantt = figure.add_axes((LEFT / WIDTH, 1 - (top + heights[0]) / height, inner, heights[0] / height))
        _draw_rows(gantt, simulation, plan, scale)
        lowest = gantt
        if with_memory:
            lowest = figure.add_axes(
                (LEFT / WIDTH, bottom / height, inner, heights[1] / height), sharex=gantt
            )
            _draw_memory(lowest, simulation, scale)
            gantt.tick_params(labelbottom=False)
        lowest.set_xlabel("time" if unit == "unit" else f"time ({axis_unit})")
        figure.text(LEFT / WIDTH, 1 - 0.3 / height, title, fontsize=13, fontweight="bold")
        figure.text(LEFT / WIDTH, 1 - 0.55 / height, subtitle, color="#404040")
        _draw_legend(figure, simulation, plan, height)
        figure.savefig(path, dpi=110, metadata={"Date": None} if str(path).endswith(".svg") else None)


def _axis_unit(makespan: float, unit: str) -> tuple[float, str]:
    """Factor from the table's unit to that of the axis, and the name of the latter."""
    if unit == "unit":
        return 1.0, unit
    seconds = makespan * unit_seconds(unit)
    name = "s" if seconds >= 1 else "ms" if seconds >= 1e-3 else "us"
    return unit_seconds(unit) / unit_seconds(name), "µs" if name == "us" else name


def _draw_rows(axes: Axes, simulation: Simulation, plan: Plan, scale: float) -> None:
    span = simulation.makespan * scale or 1.0
    points = (WIDTH - LEFT - RIGHT) * 72 / span
    shades = _shades(simulation.events)
    for device, row in enumerate(simulation.events):
        lane = (device - ROW_HEIGHT / 2, ROW_HEIGHT)
        axes.broken_barh([(0, span)], lane, facecolor=IDLE, linewidth=0)
        drawn = [event for event in row if event.end > event.start]
        axes.broken_barh(
            [(e.start * scale, (e.end - e.start) * scale) for e in drawn],
            lane,
            facecolors=[_shade(e, shades[device, e.action.stage]) for e in drawn],
            edgecolor="white",
            linewidth=0.6 if min(((e.end - e.start) * scale * points for e in drawn), default=9) > 4 else 0.2,
        )
        for event in drawn:
            text, room = str(event.action.microbatch), (event.end - event.start) * scale * points
            if room >= 0.62 * LABEL_POINTS * len(text) + 1.5:
                middle = (event.start + event.end) / 2 * scale
                axes.text(middle, device, text, ha="center", va="center_baseline", fontsize=LABEL_POINTS)
    axes.set_xlim(0, span)
    _device_axis(axes, plan.devices)


def _shades(events: Sequence[Sequence[Event]]) -> dict[tuple[int, int], float]:
    """For each (device, stage) how far its colour is mixed with white, from 0 to 0.6."""
    shades = {}
    for device, row in enumerate(events):
        stages = sorted({event.action.stage for event in row})
        for i, stage in enumerate(stages):
            shades[device, stage] = 0.6 * i / max(len(stages) - 1, 1)
    return shades


def _shade(event: Event, white: float) -> tuple[float, ...]:
    return tuple(c + (1 - c) * white for c in to_rgb(COLORS[event.action.phase]))


def _draw_memory(axes: Axes, simulation: Simulation, scale: float) -> None:
    """One band a device, all to the scale of the largest peak, which is written at the right."""
    largest = max(simulation.peak_bytes)
    for device, steps in enumerate(simulation.memory):
        times = [time * scale for time, _ in steps] + [simulation.makespan * scale]
        floor = device + ROW_HEIGHT / 2
        tops = [floor - ROW_HEIGHT * size / largest for _, size in steps]
        axes.fill_between(times, floor, [*tops, tops[-1]], step="post", color=MEMORY, linewidth=0)
        axes.axhline(floor, color="#B0B0B0", linewidth=0.6)
        axes.annotate(
            format_bytes(simulation.peak_bytes[device]),
            (1, device),
            xycoords=("axes fraction", "data"),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.annotate(
        "peak memory", (1, 1), xycoords="axes fraction", xytext=(5, 3), textcoords="offset points", fontsize=8
    )
    _device_axis(axes, len(simulation.memory))


def _device_axis(axes: Axes, devices: int) -> None:
    axes.set_ylim(devices - 0.5, -0.5)
    axes.set_yticks(range(devices), [f"device {d}" for d in range(devices)])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_legend(figure: Figure, simulation: Simulation, plan: Plan, height: float) -> None:
    used = {event.action.phase for row in simulation.events for event in row}
    patches = [Patch(color=COLORS[p], label=f"{p} {PHASE_NAMES[p]}") for p in COLORS if p in used]
    if plan.stages > plan.devices:
        patches.append(Patch(color="#9C9C9C", label="lighter: later stage of a device"))
    patches.append(Patch(color=IDLE, label="idle"))
    figure.legend(
        handles=patches,
        loc="upper left",
        bbox_to_anchor=(LEFT / WIDTH, 1 - 0.66 / height),
        ncols=len(patches),
        frameon=False,
        borderaxespad=0,
        handlelength=1.2,
        columnspacing=1.2,
    )
