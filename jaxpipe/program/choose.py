"""How a plan is lowered where nobody says how: static or stacked slots, one pattern of permutes or several.

Both are bought with ops to compile: a static slot has ops of its own, and every pattern has all ops again.
"""

from collections.abc import Sequence

from jaxpipe.costs.table import CostTable
from jaxpipe.planning.plan import Plan
from jaxpipe.program.arrange import arrange
from jaxpipe.program.program import Program, lower
from jaxpipe.program.spec import PieceSpec

OPS = 256
"""Ops that a step may be compiled with, once for each pattern: about two minutes' worth, on 2 cores."""

PATTERNS = (1, 2, 4, 8)
"""Numbers of patterns that are tried."""

GAIN = 0.02
"""Share of the step's time that more patterns must save."""


def lower_by_numbers(
    plan: Plan, pieces: Sequence[PieceSpec], costs: CostTable, slots: str = "auto", patterns: int = 0
) -> Program:
    """Lowers a plan with what is predicted to be the best of both choices, or with what is asked for.

    slots: "static", "stacked", or "auto": static unless that makes more than OPS ops.
    patterns: at most so many; 0: of PATTERNS the fewest that come within GAIN of the best by the
      recurrence, among those that make at most OPS ops in all.

    Raises as `lower`.
    """
    stacked = slots == "stacked"
    if slots == "auto" or not patterns:
        ops = len(lower(plan, pieces, stacked, costs).signature.ops)
        if slots == "auto" and ops > OPS:
            stacked, ops = True, len(lower(plan, pieces, True, costs).signature.ops)
        affordable = [count for count in PATTERNS if count * ops <= OPS] or [1]
        patterns = patterns or _fewest(plan, pieces, costs, affordable)
    return lower(plan, pieces, stacked, costs, patterns)


def _fewest(plan: Plan, pieces: Sequence[PieceSpec], costs: CostTable, counts: Sequence[int]) -> int:
    """The least of `counts` whose arrangement takes at most GAIN longer than the best."""
    if len(counts) == 1:
        return counts[0]
    times = {count: arrange(plan, pieces, costs, count)[0].makespan for count in counts}
    return min(count for count in counts if times[count] <= (1 + GAIN) * min(times.values()))
