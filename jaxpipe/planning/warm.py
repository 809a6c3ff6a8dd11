"""Planners run once on next to nothing: Numba compiles at the first call, which takes up to half a minute.

Whoever measures how long a search takes, or ends it by a clock, calls these before.
"""

from contextlib import suppress
from functools import cache

from jaxpipe.costs.table import CostTable, PieceCost
from jaxpipe.planning.named import named_plan
from jaxpipe.planning.polish import polish
from jaxpipe.planning.stages import CORE
from jaxpipe.planning.tune import tune

_KINDS = ("embed", *("pre", CORE, "post") * 4, "head")
COSTS = CostTable("unit", tuple(PieceCost(f"p{i}", kind, 1, 1, 1) for i, kind in enumerate(_KINDS)))
"""Pieces enough for every schedule on DEVICES devices with MICROBATCHES micro-batches."""
DEVICES, MICROBATCHES = 2, 8


@cache
def warm_schedule(name: str) -> None:
    """Compiles what makes the plan of a name."""
    with suppress(ValueError):  # of an unknown name, which the plan itself will say
        named_plan(name, COSTS, DEVICES, MICROBATCHES)


@cache
def warm_search() -> None:
    """Compiles what `tune` runs."""
    found = tune(COSTS, DEVICES, MICROBATCHES, evaluations=1, go_on=lambda made, makespan: False)
    polish(found[0].plan, COSTS, [float("inf")] * DEVICES, 1, 0)
