import re

import pytest

from jaxpipe.costs.table import CostTable, PieceCost
from jaxpipe.planning.named import NAMED, named_plan
from jaxpipe.planning.plan import Plan
from jaxpipe.planning.simulator import lower_bound, simulate

BY_RULE = (
    *("gpipe", "gpipe_split", "1f1b", "1f1b_split", "zb_h1", "zb_h2"),
    *("s_1f1b", "interleaved_1f1b", "breadth_first", "hanayo"),
)


def llama(layers):
    """Costs of a small llama-like model: an embedding, four pieces a layer and a head."""
    kinds = {"pre": "attention_pre", "attention": "attention_core", "post": "attention_post", "mlp": "mlp"}
    pieces = [PieceCost("embed", "embed", 0.1, 0, 0.1, param_bytes=100, stash_bytes=1, output_bytes=8)]
    for layer in range(layers):
        for part, kind in kinds.items():
            core = part == "attention"
            pieces.append(
                PieceCost(
                    f"layer_{layer:02d}/{part}",
                    kind,
                    2 if core else 1,
                    4 if core else 1,
                    0 if core else 1,
                    param_bytes=0 if core else 40,
                    stash_bytes=16,
                    grad_stash_bytes=0 if core else 8,
                    output_bytes=8,
                )
            )
    pieces.append(PieceCost("head", "head", 3, 3, 3, param_bytes=100, stash_bytes=4, grad_stash_bytes=4))
    return CostTable("ms", tuple(pieces))


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("name", NAMED)
def test_every_name_makes_a_plan_that_runs(name, devices):
    costs, microbatches = llama(8), 16
    plan = named_plan(name, costs, devices, microbatches)
    assert (plan.name, plan.devices, plan.microbatches) == (name, devices, microbatches)
    assert plan.pieces == tuple(piece.name for piece in costs.pieces)
    simulation = simulate(plan, costs)
    assert simulation.makespan >= lower_bound(costs, devices, microbatches) * (1 - 1e-12)
    recomputed = sum(p.F for p, policy in zip(costs.pieces, plan.recompute) if policy != "none")
    work = microbatches * sum(piece.total for piece in costs.pieces)
    assert work - 1e-6 <= sum(simulation.busy) <= work + microbatches * recomputed + 1e-6


def test_s_1f1b_cuts_by_layers_and_1f1b_by_time():
    costs = llama(4)
    usual, tuned = (named_plan(name, costs, 4, 8) for name in ("s_1f1b", "1f1b"))
    assert usual.stage_bounds == (0, 5, 9, 13, 18)
    assert usual.schedule == tuned.schedule
    assert simulate(tuned, costs).makespan < simulate(usual, costs).makespan


@pytest.mark.parametrize(
    ("name", "homes"),
    [
        ("zb_h2", (0, 1, 2)),
        ("interleaved_1f1b", (0, 1, 2, 0, 1, 2)),
        ("breadth_first", (0, 1, 2, 0, 1, 2)),
        ("hanayo", (0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0)),
    ],
)
def test_placement(name, homes):
    plan = named_plan(name, llama(6), 3, 6)
    assert isinstance(plan, Plan)
    assert plan.stage_to_device == homes


@pytest.mark.parametrize(
    ("name", "devices", "microbatches", "message"),
    [
        ("zb_h9", 2, 4, "unknown schedule 'zb_h9'; known: gpipe, gpipe_split, 1f1b"),
        ("1f1b", 0, 4, "devices is 0; expected at least 1"),
        ("1f1b", 2, 0, "microbatches is 0; expected at least 1"),
        (
            "interleaved_1f1b",
            4,
            6,
            "schedule 'interleaved_1f1b' on 4 devices takes multiples of 4 micro-batches, not 6",
        ),
        ("hanayo", 8, 8, "18 pieces cannot fill 32 stages of schedule 'hanayo' on 8 devices; expected"),
        ("1f1b", 19, 8, "18 pieces cannot fill 19 devices; expected a piece for each at least"),
        ("s_1f1b", 5, 8, "4 layers cannot fill 5 devices; expected a layer for each at least"),
    ],
)
def test_mistakes_get_one_line(name, devices, microbatches, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as error:
        named_plan(name, llama(4), devices, microbatches)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", NAMED)
def test_each_name_takes_its_counts_and_no_others(name):
    costs, devices = llama(8), 3
    _, step, least = NAMED[name]
    for microbatches in range(1, 2 * max(step(devices), least(devices)) + 2):
        if microbatches % step(devices) or microbatches < least(devices):
            with pytest.raises(
                ValueError, match=f"^schedule '{name}' on 3 devices takes .*, not {microbatches}$"
            ):
                named_plan(name, costs, devices, microbatches)
        else:
            simulate(named_plan(name, costs, devices, microbatches), costs)


def test_schedules_by_rule_take_these_counts():
    steps = {name: NAMED[name].step(4) for name in BY_RULE}
    assert steps == {name: 4 if name == "interleaved_1f1b" else 1 for name in BY_RULE}
    assert {NAMED[name].least(4) for name in BY_RULE} == {1}
