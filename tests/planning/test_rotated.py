from dataclasses import replace

import pytest

from jaxpipe.costs.table import CostTable, Link, PieceCost
from jaxpipe.planning.judge_plan import floating_stages
from jaxpipe.planning.named import named_plan
from jaxpipe.planning.plan import check
from jaxpipe.planning.rotated import rotated_plans
from jaxpipe.planning.simulator import simulate


def table(layers=4, limit=None):
    """Recompute of blocks saves memory, that of "post" more of it for the time."""
    pieces = [PieceCost("embed", "embed", 0, 0, 1, param_bytes=3)]
    for i in range(layers):
        pieces += [
            PieceCost(f"{i}/pre", "attention_pre", 2, 2, 2, 1, stash_bytes=6, output_bytes=2),
            PieceCost(f"{i}/attention", "attention_core", 3, 6, 0, 0, stash_bytes=2, output_bytes=2),
            PieceCost(f"{i}/post", "mlp", 1, 1, 1, 1, stash_bytes=8, output_bytes=2),
        ]
    return CostTable("unit", (*pieces, PieceCost("head", "head", 0, 1, 1, 2)), Link(0.5, 4), limit)


def test_the_named_plans_where_nothing_is_recomputed():
    costs = table()
    plans = rotated_plans(costs, 2, 8, recompute=False, split=False)
    named = [named_plan(name, costs, 2, 8) for name in ("helix_naive", "helix_two_fold")]
    assert [plan.schedule for plan in plans] == [plan.schedule for plan in named]
    times = [[simulate(plan, costs).makespan for plan in found] for found in (plans, named)]
    assert times[0] == times[1]
    assert rotated_plans(costs, 2, 8, recompute=True, split=False) == plans  # there is no limit to fit


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("limit", [None, 200, 120])
def test_plans_are_right(split, limit):
    costs = table(limit=limit)
    plans = rotated_plans(costs, 2, 8, recompute=True, split=split)
    assert plans
    for plan in plans:
        check(plan, floating_stages(plan, costs))
        phases = {action.phase for row in plan.schedule for action in row}
        assert phases == ({"F", "I", "W"} if split else {"F", "B"})
        simulate(plan, costs)


def peaks(plans, costs):
    return [max(simulate(plan, costs).peak_bytes) for plan in plans]


def test_between_the_named_policies():
    """Where no recompute breaks the limit, less than the paper's recompute keeps it, in a shorter step."""
    costs = table()
    none, full = (named_plan(name, costs, 2, 8) for name in ("helix_naive", "helix_naive_recompute"))
    low, high = peaks([full, none], costs)
    limit = int((low + high) / 2)
    tight = replace(costs, memory_limit_bytes=limit)
    fits = [plan for plan, peak in zip(*two(tight)) if peak <= limit and plan.name == "helix_1"]
    best = min(simulate(plan, costs).makespan for plan in fits)
    assert simulate(none, costs).makespan < best < simulate(full, costs).makespan


def two(costs):
    plans = rotated_plans(costs, 2, 8, recompute=True, split=False)
    return plans, peaks(plans, costs)


def test_fits_where_the_paper_recomputes_in_vain():
    """Recompute of pieces that stash less than they read costs memory; a fitted plan leaves them alone."""
    costs = table()
    pieces = [replace(p, stash_bytes=1) if p.name.endswith("pre") else p for p in costs.pieces]
    costs = replace(costs, pieces=tuple(pieces))
    named = [
        named_plan(f"helix_{name}", costs, 2, 8)
        for name in ("naive", "naive_recompute", "two_fold", "two_fold_recompute")
    ]
    limit = int(min(peaks(named, costs))) - 1
    _, found = two(replace(costs, memory_limit_bytes=limit))
    assert min(found) <= limit


def test_none_where_attention_cannot_rotate():
    plain = CostTable("unit", tuple(PieceCost(f"p{i}", "mlp", 1, 1, 1) for i in range(4)))
    costs = table()
    owned = replace(costs, pieces=tuple(replace(p, param_bytes=1) for p in costs.pieces))
    ends = replace(costs, pieces=costs.pieces[2:])  # nothing before the first core
    for model in (plain, owned, ends):
        assert rotated_plans(model, 2, 4, recompute=True, split=True) == []
    assert rotated_plans(costs, 2, 3, recompute=True, split=True) == []
    assert [plan.name for plan in rotated_plans(costs, 2, 6, False, False)] == ["helix_1"]
