"""Programs with a fault in their tables: what the verifier says of them, and what the executor makes of them.

    python -m experiments.benchmarks.mutations

About 1,000 mutations (`tests/program/mutations.py`) of programs of small models: with B whole and with I
and W apart, slots static and stacked, one pattern and several. Those that `verify` accepts all run, and a
share of the rejected ones, on virtual CPU devices against the sequential model in float32. Only tables
change, so the mutations of a program share its compiled step. An error is the largest of
|found / expected - 1| of the loss and max|found - expected| / max|expected| of any parameter; within the
tolerance a result is the same. Some of the rejected ones do no harm: they repeat an I that has nothing to do,
name another micro-batch for a piece that does not look at the batch, or a slot, pattern or register past the
last, which the executor reads as the last.
"""

import sys
from random import Random
from typing import NamedTuple

from absl import app, flags
from rich.console import Console

from experiments.benchmarks.output import begin, make_table, write_results
from experiments.benchmarks.pipelines import (
    Traced,
    compiled_step,
    lively_params,
    random_batch,
    run,
    sequential,
    small_model,
    trace,
    worst_error,
)
from jaxpipe.costs.analytic import analytic_costs
from jaxpipe.planning.build import make_plan
from jaxpipe.program.program import Program, lower
from jaxpipe.program.spec import PieceSpec
from jaxpipe.program.verify import verify
from jaxpipe.runtime.mesh import make_mesh
from jaxpipe.runtime.specs import piece_specs
from tests.program.mutations import TABLES, Mutation, differs, with_patterns

EACH = flags.DEFINE_integer("each", 17, "mutations of each kind of each program", lower_bound=1)
SHARE = flags.DEFINE_float("share", 0.1, "share of the rejected ones to run", 0, 1)
MICROBATCHES, SEQUENCES, LENGTH = 5, 2, 16
TOLERANCE = 1e-5
TRIES = 50
"""For each mutation wanted; some kinds often find nothing to change."""


class Case(NamedTuple):
    """A program to mutate; patterns: how many sets of permutes it has."""

    family: str
    devices: int
    schedule: str
    stacked: bool
    patterns: int


CASES = (
    Case("llama", 2, "1f1b", False, 1),
    Case("llama", 2, "zb_h1", True, 3),
    Case("nemotron_h", 4, "1f1b_split", False, 2),
)


class Row(NamedTuple):
    """Mutations of one kind; ran and harmless: of the rejected, how many ran and then gave the same.

    worst: the largest error among the accepted; None when none was.
    """

    mutation: str
    made: int
    rejected: int
    ran: int
    harmless: int
    accepted: int
    wrong: int
    worst: float | None


def main(argv: list[str]) -> None:
    """Mutates case by case and prints a table; exits with 1 when an accepted mutation gives wrong results."""
    begin(argv, devices=max(case.devices for case in CASES))
    found = {mutate.__name__: [] for mutate in TABLES}
    for case in CASES:
        for mutate, outcomes in attack(case).items():
            found[mutate] += outcomes
        print(f"{case}: done", flush=True)
    rows = [row_of(name, outcomes) for name, outcomes in found.items()]
    rows.append(row_of("all", [o for outcomes in found.values() for o in outcomes]))
    title = "mutations (harmless: of the rejected that ran; error: worst of the accepted)"
    table = make_table(title, "mutation", "made", "rejected", "harmless", "accepted", "wrong", "error")
    for row in rows:
        worst = "" if row.worst is None else f"{row.worst:.0e}"
        counts = (row.made, row.rejected, f"{row.harmless}/{row.ran}", row.accepted, row.wrong)
        table.add_row(row.mutation, *map(str, counts), worst)
    Console().print(table)
    write_results({"tolerance": TOLERANCE, "rows": [row._asdict() for row in rows]})
    sys.exit(rows[-1].wrong > 0)


def attack(case: Case) -> dict[str, list[tuple[bool, float | None]]]:
    """Mutation -> for each one made, whether it was accepted and its error; None where it did not run."""
    traced, pieces, program = prepare(case)
    verify(program, pieces)
    step, params = compiled_step(traced, program), lively_params(case.family)
    batch = random_batch(0, MICROBATCHES, SEQUENCES, LENGTH)
    wanted_loss, wanted = sequential(traced.model)(params, batch)

    def error(changed: Program) -> float:
        loss, grads = run(traced, step, changed, params, batch)
        errors = (abs(loss / wanted_loss - 1), worst_error(grads, wanted))
        return max(errors) if all(e >= 0 for e in errors) else float("inf")  # NaN compares false

    if not (own := error(program)) <= TOLERANCE:
        raise ValueError(f"{case} has an error of {own:.1e} before any mutation")
    found = {}
    for mutate in TABLES:
        random, found[mutate.__name__] = Random(f"{case} {mutate.__name__}"), []
        for changed in mutations(mutate, program, pieces, random):
            accepted = accepts(changed, pieces)
            runs = accepted or random.random() < SHARE.value
            found[mutate.__name__].append((accepted, error(changed) if runs else None))
    return found


def prepare(case: Case) -> tuple[Traced, list[PieceSpec], Program]:
    """The traced model of a case, its pieces for the lowering, and the program."""
    model = small_model(case.family)
    traced = trace(model, make_mesh(case.devices), ("none",), SEQUENCES, LENGTH)
    costs = analytic_costs(model, traced.codes, "cpu", traced.dtype.itemsize)
    plan = make_plan(costs, case.devices, MICROBATCHES, case.schedule, "balanced", "none")
    pieces = piece_specs(model, traced.codes, plan.recompute)
    program = lower(plan, pieces, case.stacked)
    return traced, pieces, with_patterns(program, case.patterns) if case.patterns > 1 else program


def mutations(mutate: Mutation, program: Program, pieces: list[PieceSpec], random: Random) -> list[Program]:
    """Changed programs, as many as --each says or fewer where the kind finds too little to change."""
    made = (mutate(program, pieces, random) for _ in range(EACH.value * TRIES))
    changed = (m for m in made if differs(program, m))
    return [m for m, _ in zip(changed, range(EACH.value))]


def accepts(program: Program, pieces: list[PieceSpec]) -> bool:
    """Whether the verifier lets a program pass."""
    try:
        verify(program, pieces)
    except ValueError:
        return False
    return True


def row_of(name: str, outcomes: list[tuple[bool, float | None]]) -> Row:
    """Counts of the outcomes of one kind of mutation."""
    accepted = [error for ok, error in outcomes if ok]
    rejected = [error for ok, error in outcomes if not ok]
    ran = [error for error in rejected if error is not None]
    same = sum(error <= TOLERANCE for error in ran)
    wrong = sum(error > TOLERANCE for error in accepted)
    return Row(
        name, len(outcomes), len(rejected), len(ran), same, len(accepted), wrong, max(accepted, default=None)
    )


if __name__ == "__main__":
    app.run(main)
