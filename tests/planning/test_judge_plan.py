from dataclasses import replace

import pytest

from jaxpipe.costs.table import CostTable, Link, PieceCost
from jaxpipe.planning.interchange import sheet_of
from jaxpipe.planning.judge import judge
from jaxpipe.planning.judge_memory import peak_bytes
from jaxpipe.planning.judge_plan import floating_stages, judge_plan
from jaxpipe.planning.named import NAMED, named_plan

KINDS = ("pre", "attention_core", "post") * 8
COSTS = CostTable(
    "ms",
    tuple(
        PieceCost(f"p{i}", kind, 1, 2, 1, 0 if kind == "attention_core" else 4, 8, 2, 16)
        for i, kind in enumerate(KINDS)
    ),
    Link(0.5, 64),
    80_000,
)


@pytest.mark.parametrize("name", NAMED)
def test_every_named_plan_is_valid(name):
    verdict, memory = judge_plan(named_plan(name, COSTS, 4, 8), COSTS, "padded")
    assert verdict.error is None
    assert len(memory) == 4
    assert bool(verdict.floating) == name.startswith("helix")


@pytest.mark.parametrize("memory_model", ["padded", "ideal"])
def test_the_same_as_of_its_sheet(memory_model):
    plan = named_plan("s_1f1b", COSTS, 4, 8)
    verdict, memory = judge_plan(plan, COSTS, memory_model)
    sheet = sheet_of(plan.schedule)
    assert verdict == judge(sheet, COSTS)
    assert memory == peak_bytes(sheet, verdict, COSTS, memory_model)


def test_stages_that_float_hold_cores_without_parameters_alone():
    plan = replace(named_plan("1f1b", COSTS, 4, 8), stage_bounds=(0, 1, 2, 4, 24))
    assert floating_stages(plan, COSTS) == (1,)
    pieces = [replace(piece, param_bytes=1) for piece in COSTS.pieces]
    assert floating_stages(plan, replace(COSTS, pieces=tuple(pieces))) == ()


def test_another_table():
    plan = named_plan("1f1b", COSTS, 4, 8)
    with pytest.raises(ValueError, match="differ: 23 pieces in the table, 24 in the plan"):
        judge_plan(plan, replace(COSTS, pieces=COSTS.pieces[:-1]), "ideal")
