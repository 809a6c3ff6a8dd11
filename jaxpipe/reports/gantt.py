"""Gantt charts of simulated plans, with the memory of each device below, as SVG."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxpipe.costs.table import CostTable
from jaxpipe.planning.memory import Timeline
from jaxpipe.planning.plan import Action, Event, Plan
from jaxpipe.planning.simulator import Simulation
from jaxpipe.reports import svg
from jaxpipe.reports.trace import PHASE_NAMES
from jaxpipe.reports.units import format_bytes, format_duration, unit_seconds

# Blue, teal, green, orange; teal and green differ in lightness too, for eyes that see no hue there.
COLORS = {"F": "#74A9E0", "I": "#43BBB2", "W": "#A5D46A", "B": "#F5A84B"}
IDLE, LANE, GREY = "#FFFFFF", "#D5D5D5", "#9C9C9C"
MEMORY, LIMIT = "#9C87B8", "#C62828"
LIGHTEST = 0.5  # how far the last stage of a device is mixed with white
ATTENTION = "attention_core"  # kind of the pieces that are hatched

# Pixels.
NARROW, WIDE = 1150.0, 4000.0  # least and greatest width of a picture
LEFT, RIGHT, TOP, GAP, BOTTOM = 80.0, 100.0, 98.0, 38.0, 50.0  # margins; GAP between rows and memory
LABEL, SMALL = 10.0, 5.5  # font sizes in boxes: the usual, and the smallest that is written
BAR = 0.8  # height of a box over the distance between rows


class Label(NamedTuple):
    """What is written in a box."""

    text: str
    size: float
    upright: bool


class _Frame(NamedTuple):
    """Where things are. scale: pixels for one unit of time; row: pixels from one device to the next."""

    width: float
    scale: float
    row: float

    def box(self, event: Event) -> svg.Box:
        top = TOP + event.device * self.row + (1 - BAR) / 2 * self.row
        return LEFT + event.start * self.scale, top, (event.end - event.start) * self.scale, BAR * self.row


def write_gantt(
    simulation: Simulation,
    plan: Plan,
    path: Path | str,
    title: str,
    unit: str,
    attention: Collection[int] = (),
    memory_limit_bytes: float | None = None,
) -> None:
    """Writes the picture that `draw_gantt` makes of the same arguments."""
    drawn = draw_gantt(simulation, plan, title, unit, attention, memory_limit_bytes)
    Path(path).write_text(drawn, encoding="utf-8")


def draw_gantt(
    simulation: Simulation,
    plan: Plan,
    title: str,
    unit: str,
    attention: Collection[int] = (),
    memory_limit_bytes: float | None = None,
) -> str:
    """An SVG of what each device does and, when the cost table knows bytes, of what it holds.

    Rows are devices, idle time is white. A box says "stage.micro-batch", the micro-batch alone where there is
    less room, upright where the box is narrow, and nothing where there is none. Stages that share a
    device differ in lightness. The picture grows wider with the number of actions, up to WIDE.

    unit: time unit of the cost table.
    attention: stages to hatch, as `attention_stages` finds them.
    memory_limit_bytes: drawn as a line in the memory strip.

    Raises:
      ValueError: when `unit` is unknown.
    """
    axis_scale, axis_unit = _axis_unit(simulation.makespan, unit)
    width = _width(simulation, len(str(plan.microbatches - 1)))
    scale = (width - LEFT - RIGHT) / (simulation.makespan or 1.0)
    frame = _Frame(width, scale, 33.0)
    bottom = TOP + frame.row * plan.devices
    subtitle = (
        f"makespan {format_duration(simulation.makespan, unit)}, bubble {simulation.bubble_fraction:.1%} of "
        f"{plan.devices} devices × makespan, {plan.microbatches} micro-batches"
    )
    parts = [
        svg.text(title, LEFT, 22, 18, font_weight="bold"),
        svg.text(subtitle, LEFT, 47, 12, fill="#404040"),
        *_legend(simulation, plan, attention),
        *_rows(simulation, plan, frame, attention),
    ]
    if max(simulation.peak_bytes) > 0:
        parts += _memory(simulation, frame, bottom + GAP, memory_limit_bytes)
        bottom += GAP + 0.75 * frame.row * plan.devices
    parts += _time_axis(simulation.makespan, frame, bottom, axis_scale, axis_unit)
    return svg.document(width, bottom + BOTTOM, parts)


def attention_stages(plan: Plan, costs: CostTable) -> tuple[int, ...]:
    """The stages that hold nothing but attention cores."""
    kinds = [{costs.pieces[i].kind for i in plan.stage_pieces(stage)} for stage in range(plan.stages)]
    return tuple(stage for stage, found in enumerate(kinds) if found == {ATTENTION})


def label(action: Action, width: float, height: float, digits: int, shared: bool) -> Label | None:
    """The most that can be written in a box of so many pixels; None where nothing can.

    digits: of the largest micro-batch. All numbers are given the room of the largest, so that boxes of one
      size are written alike.
    shared: whether devices have several stages; if so, better both numbers upright than one level.
    """
    both, short = f"{action.stage}.{action.microbatch}", str(action.microbatch)
    spare = digits - len(short)
    level = [(short, False, LABEL), (short, False, 0.75 * LABEL)]
    turned = [(both, True, SMALL)]
    others = turned + level if shared else level + turned
    for text, upright, least in [(both, False, LABEL), *others, (short, True, SMALL)]:
        along, across = (height, width) if upright else (width, height)
        size = min(LABEL, (along - 2) / (svg.CHARACTER * (len(text) + spare)), (across - 0.8) / 0.9)
        if size >= least:
            return Label(text, size, upright)
    return None


def _width(simulation: Simulation, digits: int) -> float:
    """Pixels with which a micro-batch can be read in most boxes, between NARROW and WIDE."""
    times = sorted(e.end - e.start for row in simulation.events for e in row if e.end > e.start)
    if not times:
        return NARROW
    needed = (svg.CHARACTER * LABEL * digits + 2) * simulation.makespan / times[len(times) // 10]
    return round(min(max(needed + LEFT + RIGHT, NARROW), WIDE))


def _axis_unit(makespan: float, unit: str) -> tuple[float, str]:
    """Factor from the table's unit to that of the axis, and the name of the latter."""
    if unit == "unit":
        return 1.0, unit
    seconds = makespan * unit_seconds(unit)
    name = "s" if seconds >= 1 else "ms" if seconds >= 1e-3 else "us"
    return unit_seconds(unit) / unit_seconds(name), "µs" if name == "us" else name


def _rows(simulation: Simulation, plan: Plan, frame: _Frame, attention: Collection[int]) -> Iterator[str]:
    """Boxes of one colour are one path, and labels a group, so that the file stays small."""
    same: dict[tuple[str, bool], list[svg.Box]] = defaultdict(list)
    labels, names, lanes = [], [], []
    shades, digits = _shades(simulation.events), len(str(plan.microbatches - 1))
    for device in range(plan.devices):
        whole = frame.box(Event(device, Action(0, "F", 0), 0.0, simulation.makespan))
        lanes.append(whole)
        names.append(svg.text(f"device {device}", LEFT - 8, whole[1] + whole[3] / 2, 12))
        for event in simulation.events[device]:
            if event.end <= event.start:
                continue
            x, y, width, height = box = frame.box(event)
            color = _mixed(COLORS[event.action.phase], shades[device, event.action.stage])
            same[color, event.action.stage in attention].append(box)
            if written := label(event.action, width, height, digits, plan.stages > plan.devices):
                write = svg.upright if written.upright else svg.text
                labels.append(write(written.text, x + width / 2, y + height / 2, written.size))
    yield svg.hatch("attention", "#FFFFFF99")
    yield svg.boxes(lanes, fill=IDLE, stroke=LANE)
    for (color, hatched), found in sorted(same.items()):
        edge = {"stroke": "white", "stroke_width": 0.8 if min(w for _, _, w, _ in found) > 6 else 0.4}
        yield svg.boxes(found, fill=color, **edge)
        if hatched:
            yield svg.boxes(found, fill="url(#attention)", **edge)
    yield svg.group(names, text_anchor="end")
    yield svg.group(labels, text_anchor="middle")


def _shades(events: Sequence[Sequence[Event]]) -> dict[tuple[int, int], float]:
    """For each (device, stage) how far its colour is mixed with white, from 0 to LIGHTEST."""
    shades = {}
    for device, row in enumerate(events):
        stages = sorted({event.action.stage for event in row})
        for i, stage in enumerate(stages):
            shades[device, stage] = LIGHTEST * i / max(len(stages) - 1, 1)
    return shades


def _mixed(color: str, white: float) -> str:
    """A colour mixed with white."""
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02X}" for part in parts)


def _memory(simulation: Simulation, frame: _Frame, top: float, limit: float | None) -> Iterator[str]:
    """One band a device, all to one scale, to which the limit belongs; peaks are written at the right.

    Peaks above what a device uses (the padded model's) are allocations and drawn as lines, too.
    """
    row, right, most = 0.75 * frame.row, frame.width - RIGHT, max(*simulation.peak_bytes, limit or 0.0)
    pixels, x, y = BAR * row / most, frame.width - RIGHT + 8, top - 10
    bands, floors, allocated, limits = [], [], [], []
    for device, steps in enumerate(simulation.memory):
        floor, peak = top + (device + 1) * row, simulation.peak_bytes[device]
        bands.append(_band(steps, simulation.makespan, frame.scale, floor, pixels))
        for level, found in ((0.0, floors), (peak, allocated), (limit or 0.0, limits)):
            found.append([(LEFT, floor - level * pixels), (right, floor - level * pixels)])
        color = LIMIT if limit is not None and peak > limit else "black"
        yield svg.text(format_bytes(peak), x, floor - 0.4 * row, 11, fill=color)
        yield svg.text(f"device {device}", LEFT - 8, floor - 0.4 * row, 12, text_anchor="end")
    yield svg.lines(bands, fill=MEMORY)
    yield svg.lines(floors, stroke="#B0B0B0", stroke_width=0.8)
    used = [max(size for _, size in steps) for steps in simulation.memory]
    if any(peak > size * (1 + 1e-9) for peak, size in zip(simulation.peak_bytes, used)):
        yield svg.lines(allocated, stroke=MEMORY)
        yield svg.text("allocated", x, y, 11)
    else:
        yield svg.text("peak memory", x, y, 11)
    if limit is not None:
        yield svg.lines(limits, stroke=LIMIT, stroke_dasharray="6 4")
        yield svg.lines([[(LEFT, y), (LEFT + 22, y)]], stroke=LIMIT, stroke_dasharray="6 4")
        yield svg.text(f"memory limit {format_bytes(limit)}", LEFT + 28, y, 11, fill=LIMIT)


def _band(
    steps: Timeline, end: float, scale: float, floor: float, pixels: float
) -> list[tuple[float, float]]:
    """The outline of what a device holds; `pixels` for a byte."""
    # Of steps within a pixel the last: what one action frees and the next takes would show as a slit.
    sizes: dict[float, float] = {}
    for time, size in steps:
        x = LEFT + time * scale
        near = bool(sizes) and x - next(reversed(sizes)) < 1
        sizes[next(reversed(sizes)) if near else x] = size
    points = [(LEFT, floor)]
    for x, size in sizes.items():
        points += [(x, points[-1][1]), (x, floor - size * pixels)]
    return [*points, (LEFT + end * scale, points[-1][1]), (LEFT + end * scale, floor)]


def _time_axis(makespan: float, frame: _Frame, y: float, axis_scale: float, unit: str) -> Iterator[str]:
    whole, left, right = makespan * axis_scale, LEFT, frame.width - RIGHT
    step = _tick_step(whole, (right - left) / 90)
    ticks = [i * step for i in range(math.floor(whole / step * (1 + 1e-9)) + 1)]
    places = [left + tick / axis_scale * frame.scale for tick in ticks]
    outline = [[(left, y), (right, y)], *([(x, y), (x, y + 5)] for x in places)]
    yield svg.lines(outline, stroke="black", fill="none")
    numbers = [svg.text(f"{tick:.12g}", x, y + 15, 12) for tick, x in zip(ticks, places)]
    yield svg.group(numbers, text_anchor="middle")
    name = "time" if unit == "unit" else f"time ({unit})"
    yield svg.text(name, (left + right) / 2, y + 35, 12, text_anchor="middle")


def _tick_step(whole: float, most: float) -> float:
    """1, 2 or 5 times a power of ten, such that there are at most `most` ticks."""
    if not whole:
        return 1.0
    power = 10.0 ** math.floor(math.log10(whole / most))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor * most >= whole * (1 - 1e-9))


def _legend(simulation: Simulation, plan: Plan, attention: Collection[int]) -> Iterator[str]:
    used = {event.action.phase for row in simulation.events for event in row}
    entries = [(color, f"{p} {PHASE_NAMES[p]}") for p, color in COLORS.items() if p in used]
    entries += [(GREY, "attention")] if attention else []
    entries += [(GREY, "lighter: later stage of a device")] if plan.stages > plan.devices else []
    entries += [(IDLE, "idle")]
    x, y = LEFT, TOP - 24
    for color, name in entries:
        swatch = [(x, y - 6, 14.0, 12.0)]
        yield svg.boxes(swatch, fill=color, stroke=LANE)
        if name == "attention":
            yield svg.boxes(swatch, fill="url(#attention)")
        yield svg.text(name, x + 20, y, 12)
        x += 40 + 6.8 * len(name)
    yield svg.text("in a box: stage.micro-batch, or the micro-batch", x, y, 12, fill="#404040")
