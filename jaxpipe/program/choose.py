"""How a plan is lowered where nobody says how: static or stacked slots, one pattern of permutes or several.

Both are bought with ops to compile: a static slot has ops of its own, and every pattern has all ops again.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxpipe.costs.table import CostTable
from jaxpipe.planning.plan import Plan
from jaxpipe.program.arrange import Arranged, arrangements
from jaxpipe.program.program import Program, check_fits, emit
from jaxpipe.program.spec import PieceSpec

OPS = 256
"""Ops that a step may be compiled with, once for each pattern: about two minutes' worth, on 2 cores."""

PATTERNS = (1, 2, 3, 4, 8)
"""Numbers of patterns that are tried."""

GAIN = 0.02
"""Share of the step's time that more patterns must save."""


class Lowered(NamedTuple):
    """A program, and its time by the recurrence in the unit of the cost table."""

    program: Program
    makespan: float


def lower_by_numbers(
    plan: Plan, pieces: Sequence[PieceSpec], costs: CostTable, slots: str = "auto", patterns: int = 0
) -> Lowered:
    """Lowers a plan with what is predicted to be the best of both choices, or with what is asked for.

    slots: "static", "stacked", or "auto": static unless that makes more than OPS ops.
    patterns: at most so many; 0: of PATTERNS the fewest that come within GAIN of the best by the
      recurrence, among those that make at most OPS ops in all.

    Raises as `lower`.
    """
    check_fits(plan, pieces)
    counts = (patterns,) if patterns else PATTERNS
    found = arrangements(plan, pieces, costs, counts)
    few = found[min(counts)]
    stacked = slots == "stacked" or (slots == "auto" and _ops(plan, pieces, False, few) > OPS)
    if not patterns:
        ops = _ops(plan, pieces, stacked, few)
        patterns = _fewest({count: found[count] for count in counts if count == 1 or count * ops <= OPS})
    return Lowered(emit(plan, pieces, stacked, *found[patterns]), found[patterns][0].makespan)


def _ops(plan: Plan, pieces: Sequence[PieceSpec], stacked: bool, arranged: Arranged) -> int:
    return len(emit(plan, pieces, stacked, *arranged).signature.ops)


def _fewest(found: dict[int, Arranged]) -> int:
    """The least number of patterns whose arrangement takes at most GAIN longer than the best."""
    times = {count: arrangement.makespan for count, (arrangement, _) in found.items()}
    return min(count for count, time in times.items() if time <= (1 + GAIN) * min(times.values()))
