import subprocess
import sys
from pathlib import Path

import pytest

from jaxpipe.planning import warm
from jaxpipe.planning.named import NAMED, named_plan

AFTER_IT = """
from numba.core.dispatcher import Dispatcher
from dataclasses import replace
from jaxpipe.costs.table import CostTable, Link, PieceCost
from jaxpipe.planning import engine, list_scheduler, octopipe_dispatch, polish, spread, tune, warm
from jaxpipe.planning.named import NAMED, named_plan

modules = engine, list_scheduler, octopipe_dispatch, polish, spread
compiled = [f for module in modules for f in vars(module).values() if isinstance(f, Dispatcher)]
tune.POLISH_STEPS = 600_000
for name in NAMED:
    warm.warm_schedule(name)
warm.warm_search()
before = [len(function.overloads) for function in compiled]
assert sum(before)
kinds = ("embed", *("pre", "attention_core", "post") * 6, "head")
pieces = tuple(PieceCost(f"p{i}", kind, 1.5, 2, i % 3 / 2, stash_bytes=9) for i, kind in enumerate(kinds))
whole = CostTable("ms", pieces, Link(0.1, 100.0))
for costs in whole, replace(whole, memory_limit_bytes=10**6):
    for name in NAMED:
        named_plan(name, costs, 4, 16)
    for words in tune.USUAL, tune.WORDS, ("partition", "placement"):
        for model in "padded", "ideal":
            tune.tune(costs, 4, 16, words, model, evaluations=50)
assert [len(function.overloads) for function in compiled] == before
"""


def test_nothing_is_left_to_compile():
    """In a process of its own: other tests have compiled before."""
    subprocess.run([sys.executable, "-c", AFTER_IT], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("name", NAMED)
def test_every_schedule_takes_these_numbers(name):
    named_plan(name, warm.COSTS, warm.DEVICES, warm.MICROBATCHES)


def test_an_unknown_name_is_not_said_here():
    warm.warm_schedule("zb_h9")
