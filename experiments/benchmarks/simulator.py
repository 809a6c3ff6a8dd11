"""The simulator, and schedules by name, beside numbers that others published.

    python -m experiments.benchmarks.simulator

Every line has a bar; where one is broken the program names it and exits with 1. Published numbers come from
`tests/data` (origins in its README) and from the formulas below. Bubble rates are those of the zero-bubble
papers, (T - m (F + I + W)) / T. Takes some minutes, most of them for "memory limits".
"""

import csv
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from absl import app, flags
from rich.console import Console

from experiments.benchmarks.output import begin, make_table, spread, write_results
from jaxpipe.costs.table import CostTable, Link, PieceCost
from jaxpipe.planning import engine
from jaxpipe.planning.helix import CORE
from jaxpipe.planning.interchange import read_file
from jaxpipe.planning.judge import judge
from jaxpipe.planning.named import named_plan
from jaxpipe.planning.plan import Plan
from jaxpipe.planning.simulator import Simulation, engine_costs, simulate
from jaxpipe.planning.stages import stage_costs
from jaxpipe.planning.vee import placement
from jaxpipe.planning.zero_bubble import Work, automatic

TABLES = flags.DEFINE_list("tables", None, "names of the tables to show; by default all")
DATA = Path(__file__).parents[2] / "tests" / "data"
ROUNDING = 1e-9
"""Relative; sums of times are not exact."""

Times = tuple[float, float, float]
"""F, I and W of a stage."""


class Row(NamedTuple):
    """One number beside the published one; bar: what is asked of it, in words; holds: whether it keeps it."""

    case: str
    what: str
    published: float
    found: float
    bar: str
    holds: bool


def near(case: str, what: str, published: float, found: float, within: float) -> Row:
    """A number that may be off by `within`, either way."""
    return Row(case, what, published, found, f"±{within:g}", abs(found - published) <= within)


def at_most(case: str, what: str, published: float, found: float, over: float = 0.0) -> Row:
    """A number that may be better, and worse by `over`."""
    return Row(case, what, published, found, f"+{over:g}", found <= published + over)


def equal(case: str, what: str, published: float, found: float) -> Row:
    """A number that must be the same."""
    within = ROUNDING * max(1.0, abs(published))
    return Row(case, what, published, found, "=", abs(found - published) <= within)


def main(argv: list[str]) -> None:
    """Prints the tables; exits with 1 when a bar is broken."""
    begin(argv, devices=1)
    names = TABLES.value or list(MAKERS)
    if unknown := [name for name in names if name not in MAKERS]:
        sys.exit(f"unknown tables {unknown}; known: {', '.join(MAKERS)}")
    console, results, broken = Console(), {}, []
    for name in names:
        make = MAKERS[name]
        rows = list(make())
        title = f"{name}: {make.__doc__.splitlines()[0]}"
        table = make_table(title, "case", "what", "published", "found", "bar", "")
        for row in rows:
            numbers = (f"{row.published:.5g}", f"{row.found:.5g}")
            table.add_row(row.case, row.what, *numbers, row.bar, "" if row.holds else "BROKEN")
        console.print(table)
        results[name] = [row._asdict() for row in rows]
        broken += [f"{name}, {row.case}: {row.what}" for row in rows if not row.holds]
    print(f"{sum(map(len, results.values()))} numbers, {len(broken)} bars broken", *broken, sep="\n")
    write_results({"tables": results, "broken": broken})
    sys.exit(bool(broken))


def read(name: str) -> list[dict[str, str]]:
    """The rows of a CSV file with published numbers."""
    with open(DATA / name) as file:
        return list(csv.DictReader(file))


def table_of(times: Sequence[Times], latency: float = 0.0, unit: str = "unit") -> CostTable:
    """A piece for each (F, I, W)."""
    pieces = (PieceCost(f"p{i}", "stage", *t, stash_bytes=1) for i, t in enumerate(times))
    return CostTable(unit, tuple(pieces), Link(latency))


def longest_span(simulation: Simulation) -> float:
    """The longest time between the first start and the last end of a device."""
    return max(row[-1].end - row[0].start for row in simulation.events)


def measured_iterations() -> Iterator[Row]:
    """Plain 1F1B on 8 A100s; communication neglected."""
    for row in read("a100_measured_stage_times.csv"):
        if row["method"] not in ("base", "redis"):
            continue
        forward, backward = (map(float, row[f"{x}_us_per_stage"].split()) for x in "FB")
        costs = table_of([(f, b, 0.0) for f, b in zip(forward, backward)], unit="us")
        plan = named_plan("1f1b", costs, int(row["pp"]), int(row["microbatches"]))
        wanted, found = float(row["iter_ms_measured"]), simulate(plan, costs).makespan / 1e3
        yield Row(
            row["case"].removeprefix("fullpp_"),
            "ms",
            wanted,
            found,
            "±1.6%",
            abs(found / wanted - 1) <= 0.016,
        )


def bubble_rates() -> Iterator[Row]:
    """Bubble rates of arXiv 2401.10241, at costs that its authors measured.

    T is the longest span of a device for ZB-H2 and the automatic schedules, whose memory is as in
    `memory_limits`; else the makespan.
    """
    for row in read("zb_iclr_bubble_rates.csv"):
        p, m, latency = int(row["p"]), int(row["n_microbatch"]), float(row["comm_us"])
        times = tuple(float(row[f"{phase}_us"]) for phase in "FBW")
        costs, case = table_of([times] * p, latency, "us"), f"p={p} m={m} F={times[0] / 1e3:.1f} ms"
        for name, column in (("1f1b", "br_1f1b"), ("zb_h1", "br_zbh1"), ("zb_h2", "br_zbh2")):
            found = simulate(named_plan(name, costs, p, m), costs)
            span = longest_span(found) if name == "zb_h2" else found.makespan
            yield near(case, name, float(row[column]), rate(span, m, times), 0.0002)
        stages = [Work(*times, latency, *held_bytes(int(row["hidden"]), int(row["heads"])))] * p
        for name, column, factor in (("zb1p", "br_zb1p", 1), ("zb2p", "br_zb2p", 2)):
            limit = factor * p * stages[0].held
            found = automatic(stages, range(p), m, [limit] * p, "span")
            yield at_most(case, name, float(row[column]), rate(found.span, m, times), 0.002)


def memory_limits() -> Iterator[Row]:
    """Bubble rates with at most k times the memory of 1F1B, same authors.

    zb: one stage a device; zbv: its two halves, in a V. T is the longest span of a device.
    """
    costs = read("zb_mem_limit_costs.csv")
    for row in read("zb_mem_limit_vs_bubble.csv"):
        for cost in costs:
            p, m, latency = int(cost["p"]), int(cost["n_microbatch"]), float(cost["comm_us"])
            half = tuple(float(cost[f"{phase}_us"]) for phase in "FBW")
            whole = tuple(2 * time for time in half)
            held, kept = held_bytes(int(cost["hidden"]), int(cost["heads"]))
            if row["method"] == "zb":
                stages, places = [Work(*whole, latency, held, kept)] * p, range(p)
            else:
                stages, places = [Work(*half, latency, held / 2, kept / 2)] * 2 * p, placement(p)
                stages[p - 1] = stages[p - 1]._replace(message=0.0)
            k = float(row["mem_limit_over_p_times_MB"])
            found = automatic(stages, places, m, [k * p * held] * p, "span")
            case, published = f"{row['method']}, p={p} m={m} k={k:g}", float(row[f"p{p}_n{m}"])
            yield at_most(case, "rate", published, rate(found.span, m, whole), 0.005)


def rate(whole: float, microbatches: int, times: Sequence[float]) -> float:
    """Bubble rate of a device that is busy `times` for every micro-batch, with all its stages together."""
    return (whole - microbatches * sum(times)) / whole


def held_bytes(hidden: int, heads: int, length: int = 1024) -> tuple[int, int]:
    """Memory of a layer for one token from F to I, and what of it stays until W (arXiv 2401.10241)."""
    return 34 * hidden + 5 * heads * length, 32 * hidden


def sheets() -> Iterator[Row]:
    """Schedules that others wrote, F = I = W = 1, no communication."""
    published = [
        ("pytorch_zb1p_2rank_2stagep_compute.csv", 49, 48, (4, 4)),
        ("pytorch_zb1p_2rank_2stagep_comms.csv", 49, 48, (4, 4)),
        ("torchtitan_custom_schedule.csv", 50, 48, (16, 16)),
    ]
    for row in json.loads((DATA / "torch" / "expected.json").read_text()):
        peaks = tuple(row["peak_inflight_chunk_activations"])
        published.append((f"torch/{row['file']}", row["unit_cost_makespan"], row["ideal_busy"], peaks))
    for row in json.loads((DATA / "dualpipe_expected.json").read_text()):
        if (DATA / row["file"]).exists():  # the file for 8 devices is not published
            published.append((row["file"], row["unit_makespan"], row["busy"], tuple(row["peak_inflight"])))
    for name, makespan, busy, peaks in published:
        verdict = judge(read_file(DATA / name))
        if verdict.error:
            sys.exit(f"{name}: {verdict.error}")
        case = name.removesuffix(".csv")
        yield equal(case, "makespan", makespan, verdict.makespan)
        yield equal(case, "bubble", 1 - busy / makespan, verdict.bubble_fraction)
        yield Row(case, "peak", max(peaks), max(verdict.peak_in_flight), "=", peaks == verdict.peak_in_flight)


EQUAL = ((1.0, 1.0, 1.0),)


class Formula(NamedTuple):
    """What is known of a schedule with equal stages and no communication.

    schedule: its name. stages: on each device.
    bubble: (p, m, F, I, W) -> time beyond m (F + I + W) for each stage of a device. span: of the longest
      time between first start and last end of one device, not of the whole step.
    peak: (p, m) -> most (stage, micro-batch) pairs that a device has in flight.
    times: for which F, I, W it holds.
    """

    schedule: str
    stages: int
    bubble: Callable[[int, int, float, float, float], float]
    peak: Callable[[int, int], int]
    span: bool = False
    times: Sequence[Times] = ((1.0, 1.0, 1.0), (3.0, 4.0, 2.0))
    at_most: bool = False


FORMULAS = (
    # arXiv 1811.06965; arXiv 2104.04473, sections 2.2.1 and 2.2.2; arXiv 2211.05953.
    Formula("gpipe", 1, lambda p, m, F, I, W: (p - 1) * (F + I + W), lambda p, m: m),
    Formula("1f1b", 1, lambda p, m, F, I, W: (p - 1) * (F + I + W), lambda p, m: p),
    Formula("interleaved_1f1b", 2, lambda p, m, F, I, W: (p - 1) * (F + I + W), lambda p, m: 3 * p - 1),
    Formula("breadth_first", 2, lambda p, m, F, I, W: (p - 1) * (F + I + W), lambda p, m: 2 * m),
    # arXiv 2401.10241, section 2, in which B is the input gradient.
    Formula("zb_h1", 1, lambda p, m, F, I, W: (p - 1) * (F + I - W), lambda p, m: p),
    Formula("zb_h2", 1, lambda p, m, F, I, W: (p - 1) * (F + I - 2 * W), lambda p, m: 2 * p - 1, True),
    # Section 6 there: no bubble but the fill, (p - 1)F.
    Formula("zb_v", 2, lambda p, m, F, I, W: (p - 1) * F, lambda p, m: 2 * p, times=EQUAL),
    # arXiv 2405.15362, table 1; times of its authors' scheduler, p even and no multiple of 3.
    Formula("v_half", 2, lambda p, m, F, I, W: 3 * p - 7, lambda p, m: 2 * ((p + 2) // 2), times=EQUAL),
    Formula("v_min", 2, lambda p, m, F, I, W: 4 * p - 5, lambda p, m: 2 * ((p + 4) // 3), times=EQUAL),
    # README of deepseek-ai/DualPipe, an F and a B at once taking as long as one after the other.
    Formula(
        "dualpipe_v",
        2,
        lambda p, m, F, I, W: (p - 1) * (F + 2 * (I + W) - 3 * W),
        lambda p, m: 2 * p + 1,
        at_most=True,
    ),
    # arXiv 2308.15762, two waves, m = k p.
    Formula(
        "hanayo",
        4,
        lambda p, m, F, I, W: 2 * (p - 1) * (max(F, I + W) + (m // p - 1) * abs(I + W - F)),
        lambda p, m: 4 * p,
    ),
)


def formulas() -> Iterator[Row]:
    """Bubble and peak by the formulas of the papers, stages of F/I/W."""
    for name, stages, bubble, peak, span, cases, most in FORMULAS:
        for p, m in ((4, 8), (8, 32)):
            for times in cases:
                costs = table_of([times] * stages * p)
                found = simulate(named_plan(name, costs, p, m), costs)
                whole = longest_span(found) if span else found.makespan
                case = f"{name}, p={p} m={m}, {'/'.join(f'{t:g}' for t in times)}"
                bar = at_most if most else equal
                yield bar(case, "bubble", bubble(p, m, *times), whole - stages * m * sum(times))
                yield equal(case, "peak", peak(p, m), max(found.peak_in_flight))


def helix_bubbles() -> Iterator[Row]:
    """Bubbles of layers of pre/attention/post, as in arXiv 2507.00394.

    Its two-fold bubble is that of pairs that move as one unit; apart they have a little less. Its ZB1P is
    the handcrafted schedule, ZB-H1.
    """
    for p, layers in ((4, 8), (8, 16)):
        for pre, attention, post in ((1.0, 3.0, 2.0), (2.0, 1.0, 3.0)):
            costs, share = helix_table(layers, pre, attention, post), (p - 1) * layers / p
            case = f"p={p} L={layers}, {pre:g}/{attention:g}/{post:g}"

            def bubble(name: str, m: int, unit: int = 1, costs=costs, p=p) -> float:
                plan = named_plan(name, costs, p, m)
                found = simulate(as_units(plan, unit), scaled(costs, unit))
                return found.makespan - sum(found.busy) / p

            yield equal(case, "1f1b", 3 * share * (pre + attention + post), bubble("1f1b", 2 * p))
            yield equal(case, "zb_h1", share * (pre + post + 3 * attention), bubble("zb_h1", 2 * p))
            yield equal(case, "naive", 3 * (p - 1) * (pre + post), bubble("helix_naive", 2 * p))
            for name, factor in (("helix_two_fold", 6), ("helix_two_fold_recompute", 8)):
                formula = factor * (p - 1) * (pre + post)
                what = name.removeprefix("helix_")
                yield equal(case, f"{what}, pairs", formula, bubble(name, 4 * p, 2))
                yield at_most(case, what, formula, bubble(name, 4 * p))


def helix_memory() -> Iterator[Row]:
    """Activations, in b s h, as in arXiv 2507.00394; the most on one device."""
    for p, layers in ((4, 8), (8, 16)):
        m, blocks = 2 * p, activation_table(layers)
        whole = [PieceCost(str(i), "layer", 1.0, 1.0, 1.0, stash_bytes=16) for i in range(layers)]
        for name, formula, costs in (
            ("1f1b", tuple(16 * layers // p * (p - i) for i in range(p)), CostTable("unit", tuple(whole))),
            ("helix_two_fold", (16 * m * layers // p,) * p, blocks),
            ("helix_two_fold_recompute", (4 * m * layers // p,) * p, blocks),
        ):
            found = simulate(named_plan(name, costs, p, m), costs).peak_bytes
            case = f"p={p} L={layers} m={m}"
            yield Row(case, name, max(formula), max(found), "=", formula == found)


def helix_table(layers: int, pre: float, attention: float, post: float) -> CostTable:
    """A model of attention layers; their backward takes twice the forward, and attention has no W."""
    pieces = [PieceCost("embed", "embed", 0.0, 0.0, 0.0)]
    for i in range(layers):
        pieces += [
            PieceCost(f"pre {i}", "attention_pre", pre, pre, pre),
            PieceCost(f"core {i}", CORE, attention, 2 * attention, 0.0),
            PieceCost(f"post {i}", "attention_post", post, post, post),
        ]
    return CostTable("unit", (*pieces, PieceCost("head", "head", 0.0, 0.0, 0.0)))


def activation_table(layers: int) -> CostTable:
    """Stashes in units of b s h: of the 16 of a layer 2 are of attention; what the others read is 2, too."""
    pieces = [PieceCost("pre 0", "block", 1.0, 1.0, 1.0, output_bytes=2)]
    for i in range(layers):
        pieces += [
            PieceCost(f"core {i}", CORE, 1.0, 2.0, 0.0, stash_bytes=2, output_bytes=2),
            PieceCost(f"post {i}, pre {i + 1}", "block", 1.0, 1.0, 1.0, stash_bytes=14, output_bytes=2),
        ]
    return CostTable("unit", tuple(pieces))


def as_units(plan: Plan, unit: int) -> Plan:
    """The plan with every `unit` micro-batches, which stand side by side, as one."""
    rows = tuple(
        tuple(a._replace(microbatch=a.microbatch // unit) for a in row[::unit]) for row in plan.schedule
    )
    return dataclasses.replace(plan, microbatches=plan.microbatches // unit, schedule=rows)


def scaled(costs: CostTable, factor: float) -> CostTable:
    """The table with all times of pieces multiplied."""
    pieces = (dataclasses.replace(p, F=factor * p.F, I=factor * p.I, W=factor * p.W) for p in costs.pieces)
    return dataclasses.replace(costs, pieces=tuple(pieces))


def speed() -> Iterator[Row]:
    """Millions of actions a second of one core, compiled: median (quartiles).

    21 runs of 1F1B with I and W apart, 64 devices and 1,024 micro-batches, in the CPU time they took.
    """
    devices, microbatches = 64, 1024
    costs = table_of([(1.0, 1.1, 0.9)] * devices)
    plan = named_plan("1f1b_split", costs, devices, microbatches)
    rows, times = engine.encode(plan.schedule), engine_costs(stage_costs(plan, costs), costs)
    for sends in engine.SENDS:
        links, rates = engine.connect(rows, plan.stages, plan.microbatches, sends), []
        engine.run(rows, links, *times)
        for _ in range(21):
            start = time.process_time()
            engine.run(rows, links, *times)
            rates.append(len(rows.stage) / (time.process_time() - start) / 1e6)
        rate = spread(rates)
        case = f"{sends} sends"
        yield Row(case, f"{rate}", 5.0, rate.median, "≥", rate.median >= 5.0)


MAKERS: dict[str, Callable[[], Iterator[Row]]] = {
    "bubble rates": bubble_rates,
    "memory limits": memory_limits,
    "measured iterations": measured_iterations,
    "sheets": sheets,
    "formulas": formulas,
    "helix bubbles": helix_bubbles,
    "helix memory": helix_memory,
    "speed": speed,
}
"""Every table by name."""


if __name__ == "__main__":
    app.run(main)
