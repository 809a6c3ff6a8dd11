"""The planner's partition beside the one that Vocabulary Parallelism redistributed by hand, on 8 A100s.

Stage times and iterations are those published with arXiv 2411.05288. The rows `base`, of 4 layers a stage,
tell what a layer takes, and the first and the last stage what is left for embedding and head. The head is
measured at two vocabularies; at others it is taken to be linear in them. The rows `redis` have fewer layers
beside the head.
"""

import csv
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from experiments.benchmarks.output import make_table
from experiments.benchmarks.planner_section import Bar, Section
from experiments.benchmarks.published_cells import FILE
from jaxpipe.costs.table import CostTable, PieceCost
from jaxpipe.planning.build import staged_plan
from jaxpipe.planning.plan import Plan
from jaxpipe.planning.schedules import one_f_one_b
from jaxpipe.planning.simulator import simulate
from jaxpipe.planning.tune import tune

STAGES, LAYERS = 8, 32
WAYS = (("partition",), ("partition", "placement", "schedule"))
"""What is tuned; I and W were measured together, so a schedule has B only."""
REDISTRIBUTED = {128_000: (4, 4, 4, 4, 4, 5, 5, 2), 32_000: (4,) * 8}
"""Layers of each stage in the rows `redis`, as their stage times show."""


class Row(NamedTuple):
    """One measured run of plain 1F1B. stages: (F, B) of each in ms. iteration: in ms."""

    method: str
    length: int
    vocabulary: int
    microbatches: int
    iteration: float
    stages: tuple[tuple[float, float], ...]


def a100() -> Section:
    """Partitions for 8 A100s from measured times of layers, beside those that were run there."""
    rows = [_compare(row, costs_of(row)) for row in measured() if row.method in ("base", "redis")]
    table = make_table(
        "ms an iteration",
        *("method, vocabulary, tokens", "measured", "predicted", *map(" ".join, WAYS), "layers"),
    )
    for row in rows:
        tuned = (f"{row[' '.join(words)]:.0f}" for words in WAYS)
        table.add_row(row["case"], f"{row['measured']:.0f}", f"{row['predicted']:.0f}", *tuned, row["layers"])
    table.caption = "predicted: their layers a stage at the same times; layers: those of the tuned partition"
    slower = [row["case"] for row in rows if row[WAYS[0][0]] >= row["predicted"]]
    bar = Bar("the tuned partition predicted faster than every run", ", ".join(slower) or "it is", not slower)
    return Section((table,), (bar,), rows)


def measured() -> tuple[Row, ...]:
    """All published rows."""
    with open(FILE.with_name("a100_measured_stage_times.csv")) as file:
        return tuple(map(_row, csv.DictReader(file)))


def _row(fields: dict[str, str]) -> Row:
    times = ([float(us) / 1e3 for us in fields[f"{phase}_us_per_stage"].split()] for phase in "FB")
    numbers = (int(fields[name]) for name in ("seq", "vocab", "microbatches"))
    return Row(fields["method"], *numbers, float(fields["iter_ms_measured"]), tuple(zip(*times)))


def costs_of(row: Row) -> CostTable:
    """What embedding, layers and head take with a row's length and vocabulary: F and, as I, B, in ms."""
    bases = [base for base in measured() if (base.method, base.length) == ("base", row.length)]
    parts = {base.vocabulary: _parts(base) for base in bases}
    (low, at_low), (high, at_high) = sorted(parts.items())
    share = (row.vocabulary - low) / (high - low)
    nearest = parts[min(parts, key=lambda vocabulary: abs(vocabulary - row.vocabulary))]
    head = [(1 - share) * a + share * b for a, b in zip(at_low[2], at_high[2])]
    embedding, layer = nearest[:2]
    names = ("embed", *(f"layer{i}" for i in range(LAYERS)), "head")
    times = (embedding, *[layer] * LAYERS, head)
    pieces = (PieceCost(name, name.rstrip("0123456789"), *time, 0.0) for name, time in zip(names, times))
    return CostTable("ms", tuple(pieces))


def _parts(base: Row) -> tuple[list[float], ...]:
    """(F, B) of embedding, layer and head."""
    parts = [], [], []
    for times in zip(*base.stages):
        inner = median(times[1:-1])
        for part, time in zip(
            parts, (max(0.0, times[0] - inner), inner * STAGES / LAYERS, times[-1] - inner)
        ):
            part.append(time)
    return parts


def _compare(row: Row, costs: CostTable) -> dict:
    counts = (LAYERS // STAGES,) * STAGES if row.method == "base" else REDISTRIBUTED[row.vocabulary]
    found = {
        " ".join(words): tune(costs, STAGES, row.microbatches, words, memory_model="ideal")[0]
        for words in WAYS
    }
    return {
        "case": f"{row.method}, {row.vocabulary // 1000}k, {row.length}",
        "measured": row.iteration,
        "predicted": simulate(_as_run(counts, costs, row.microbatches), costs).makespan,
        **{words: tuned.makespan for words, tuned in found.items()},
        "layers": _layers(found[WAYS[0][0]].plan),
    }


def _as_run(counts: tuple[int, ...], costs: CostTable, microbatches: int) -> Plan:
    """1F1B with so many layers a stage, the embedding before the first, the head after the last."""
    bounds = [0, *(1 + sum(counts[:stage]) for stage in range(1, STAGES)), len(costs.pieces)]
    schedule = one_f_one_b(STAGES, microbatches)
    return staged_plan("as run", costs, microbatches, range(STAGES), schedule, bounds)


def _layers(plan: Plan) -> str:
    counts = (
        sum(piece.startswith("layer") for piece in plan.pieces[low:high])
        for low, high in pairwise(plan.stage_bounds)
    )
    return " ".join(map(str, counts))
