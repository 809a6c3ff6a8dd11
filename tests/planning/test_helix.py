from dataclasses import replace

import pytest

from jaxpipe.costs.table import CostTable, Link, PieceCost
from jaxpipe.planning import helix
from jaxpipe.planning.named import named_plan
from jaxpipe.planning.plan import check
from jaxpipe.planning.simulator import simulate
from jaxpipe.program.program import lower
from jaxpipe.program.verify import verify
from tests.program.interpreter import interpret
from tests.program.toys import sequential, toy_plan, toy_specs

BALANCED = [(2, 2), (2, 6), (4, 4), (4, 8), (8, 8)]
"""(devices, layers), where devices divide layers."""
TIMES = [(1, 3, 2), (1, 10, 3), (2, 1, 3)]
"""Forwards of pre-attention, attention and post-attention; attention longer and shorter than the rest."""
FREE = Link()


def table(layers, pre, attention, post, link=FREE):
    """As the formulas assume: backward is twice the forward, attention has no W, the ends are free."""
    pieces = [PieceCost("embed", "embed", 0, 0, 0)]
    for i in range(layers):
        pieces += [
            PieceCost(f"{i}/pre", "attention_pre", pre, pre, pre, param_bytes=1),
            PieceCost(f"{i}/attention", "attention_core", attention, 2 * attention, 0),
            PieceCost(f"{i}/post", "attention_post", post, post, post, param_bytes=1),
        ]
    return CostTable("unit", (*pieces, PieceCost("head", "head", 0, 0, 0)), link)


def bubble(name, costs, devices, microbatches):
    """Makespan minus the mean busy time."""
    simulation = simulate(named_plan(name, costs, devices, microbatches), costs)
    return simulation.makespan - sum(simulation.busy) / devices


def test_the_definition_by_hand():
    """Two devices, two layers: blocks 0 and 2 on device 0, attention of layer l and micro-batch i on
    (l + i + 1) mod 2; backwards in reverse."""
    plan = named_plan("helix_naive", table(2, 1, 3, 2), 2, 2)
    assert plan.stage_bounds == (0, 2, 3, 5, 6, 8)
    assert [plan.stage_to_device[stage] for stage in (0, 2, 4)] == [0, 1, 0]
    assert [" ".join(map(str, row)) for row in plan.schedule] == [
        "0F0 0F1 1F1 3F0 4F0 4F1 4B1 4B0 3B0 1B1 0B1 0B0",
        "1F0 2F0 2F1 3F1 3B1 2B1 2B0 1B0",
    ]


@pytest.mark.parametrize(("name", "fold"), [("helix_naive", 1), ("helix_two_fold", 2)])
def test_placement_as_published(name, fold):
    devices, layers = 4, 6
    plan = named_plan(name, table(layers, 1, 3, 2), devices, 2 * fold * devices)
    for device, row in enumerate(plan.schedule):
        phases = "".join(action.phase for action in row)
        assert phases == "F" * (len(row) // 2) + "B" * (len(row) // 2)
        for stage, _, i in row:
            layer, is_core = divmod(stage, 2)
            assert device == (layer + i // fold + 1 if is_core else layer) % devices


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("devices", "layers"), BALANCED)
def test_bubbles_equal_the_published_formulas(devices, layers, times, rounds):
    """arXiv 2507.00394, the comparison of bubble times; ZB1P there is the handcrafted schedule, ZB-H1."""
    pre, attention, post = times
    costs, few, share = table(layers, *times), rounds * devices, (devices - 1) * layers // devices
    assert bubble("1f1b", costs, devices, few) == pytest.approx(3 * share * (pre + attention + post))
    assert bubble("zb_h1", costs, devices, few) == pytest.approx(share * (pre + post + 3 * attention))
    for name, factor in (("helix_naive", 3), ("helix_naive_recompute", 4)):
        assert bubble(name, costs, devices, few) == pytest.approx(factor * (devices - 1) * (pre + post))
    for name, factor in (("helix_two_fold", 6), ("helix_two_fold_recompute", 8)):
        formula = factor * (devices - 1) * (pre + post)
        apart = bubble(name, costs, devices, 2 * few)
        assert as_units(name, costs, devices, 2 * few) == pytest.approx(formula)
        assert (devices - 2) / (devices - 1) * formula <= apart < formula


def as_units(name, costs, devices, microbatches):
    """The bubble when both micro-batches of a pair start and end together."""
    plan = named_plan(name, costs, devices, microbatches)
    rows = []
    for row in plan.schedule:
        pairs = list(zip(row[::2], row[1::2], strict=True))
        assert all(
            a._replace(microbatch=0) == b._replace(microbatch=0) and a.microbatch ^ 1 == b.microbatch
            for a, b in pairs
        )
        rows.append(tuple(a._replace(microbatch=a.microbatch // 2) for a, _ in pairs))
    double = tuple(replace(p, F=2 * p.F, I=2 * p.I, W=2 * p.W) for p in costs.pieces)
    costs, plan = (
        replace(costs, pieces=double),
        replace(plan, microbatches=microbatches // 2, schedule=tuple(rows)),
    )
    simulation = simulate(plan, costs)
    return simulation.makespan - sum(simulation.busy) / devices


@pytest.mark.parametrize("times", [(1, 3, 2), (1, 9, 2), (2, 2, 3)])
def test_two_fold_hides_messages_that_are_shorter_than_attention_and_block(times):
    """Hidden: the bubble does not grow with the layers. The naive schedule hides none."""
    pre, attention, post = times
    longest = min(attention, pre + post)

    def grows(name, message):
        few, many = (bubble(name, table(n, *times, Link(message)), 4, 8) for n in (4, 12))
        assert few <= many + 1e-9
        return many > few + 1e-9

    assert not any(grows("helix_two_fold", message) for message in (0, longest / 2, longest))
    assert grows("helix_two_fold", longest * 1.05)
    assert grows("helix_naive", longest / 2)
    assert not grows("helix_naive", 0)


def test_two_fold_needs_sends_that_do_not_wait():
    costs = table(4, 1, 3, 2)
    assert simulate(named_plan("helix_naive", costs, 4, 8), costs, sends="rendezvous").makespan > 0
    with pytest.raises(ValueError, match="deadlocks"):
        simulate(named_plan("helix_two_fold", costs, 4, 8), costs, sends="rendezvous")


@pytest.mark.parametrize(("devices", "layers"), [(2, 4), (4, 8)])
def test_activation_memory_equals_the_published_formulas(devices, layers):
    """arXiv 2507.00394: in bsh, 16 a layer; with recompute two for what a block and two for what attention
    keeps. 1F1B holds p - i micro-batches of L/p layers on device i, two-fold HelixPipe all of them."""
    microbatches = 4 * devices
    blocks = [
        piece
        for i in range(layers + 1)
        for piece in (
            PieceCost(f"block {i}", "block", 1, 1, 1, 1, 14 if i else 0, 0, 2),
            PieceCost(f"attention {i}", "attention_core", 1, 2, 0, 0, 2, 0, 2),
        )
    ][:-1]
    costs = CostTable("unit", tuple(blocks), state_factor=0)

    def peaks(name, costs=costs):
        return simulate(named_plan(name, costs, devices, microbatches), costs).peak_bytes

    whole = [PieceCost(str(i), "layer", 1, 1, 1, stash_bytes=16) for i in range(layers)]
    one = peaks("1f1b", CostTable("unit", tuple(whole)))
    assert one == tuple(16 * (layers // devices) * (devices - i) for i in range(devices))
    assert peaks("helix_two_fold_recompute") == (4 * microbatches * layers // devices,) * devices
    assert peaks("helix_two_fold") == (16 * microbatches * layers // devices,) * devices


@pytest.mark.parametrize("name", ["helix_naive", "helix_two_fold", "helix_two_fold_recompute"])
@pytest.mark.parametrize(("devices", "layers"), [(1, 1), (2, 3), (3, 4), (5, 2)])
def test_any_counts_make_plans_that_run(name, devices, layers):
    """Also where devices do not divide layers, and where some have attention only."""
    costs = table(layers, 1, 3, 2)
    microbatches = 2 * devices * (2 if "two" in name else 1)
    plan = named_plan(name, costs, devices, microbatches)
    check(plan, helix.layout(costs, devices).floating)
    simulation = simulate(plan, costs)
    again = 3 if "recompute" in name else 0
    assert sum(simulation.busy) == microbatches * layers * (3 * (1 + 3 + 2) + again)


@pytest.mark.parametrize("fold", [1, 2])
@pytest.mark.parametrize("between", [[], ["block"], ["rotate", "block"]])
def test_programs_compute_what_the_model_means(fold, between):
    """Lowered, proven on symbols and run on integers; other blocks may stand between attention layers."""
    kinds = ["embed", *(["pre", "core", "post", *between] * 3), "head"]
    specs = toy_specs(kinds, ["residuals"] * len(kinds))
    pieces = [PieceCost(s.name, "attention_core" if s.kind == "core" else s.kind, 1, 1, 1) for s in specs]
    devices, microbatches = 2, 4
    layout = helix.layout(CostTable("unit", tuple(pieces)), devices)
    assert layout.layers == 3
    schedule = helix.helix(3, devices, microbatches, fold)
    plan = toy_plan(specs, layout.bounds, layout.stage_to_device, devices, microbatches, schedule)
    program = lower(plan, specs)
    verify(program, specs)
    assert interpret(program, specs) == sequential(specs, microbatches)


def test_recompute_leaves_attention_out():
    costs = table(2, 1, 3, 2)
    plan = named_plan("helix_naive_recompute", costs, 2, 2)
    cores = {piece.name for piece in costs.pieces if piece.kind == "attention_core"}
    assert {name for name, policy in zip(plan.pieces, plan.recompute) if policy == "none"} == cores
    assert set(named_plan("helix_naive", costs, 2, 2).recompute) == {"none"}


@pytest.mark.parametrize(("name", "step"), [("helix_naive", 4), ("helix_two_fold_recompute", 8)])
def test_microbatches_fill_rounds(name, step):
    with pytest.raises(
        ValueError, match=f"'{name}' on 4 devices takes multiples of {step} micro-batches, not 6"
    ):
        named_plan(name, table(4, 1, 3, 2), 4, 6)


def test_models_without_attention_apart_are_refused():
    costs = table(2, 1, 3, 2)

    def refused(text, **changes):
        pieces = [replace(p, **changes) if p.kind == "attention_core" else p for p in costs.pieces]
        with pytest.raises(ValueError, match=text):
            named_plan("helix_naive", replace(costs, pieces=tuple(pieces)), 2, 2)

    refused(
        "pieces of kind 'attention_core'; the cost table has kinds embed, attention_pre, mamba", kind="mamba"
    )
    refused("'0/attention' of kind 'attention_core' has param_bytes 8; expected 0", param_bytes=8)


@pytest.mark.parametrize("kinds", ["cb", "bc", "bccb"])
def test_cores_need_blocks_around_them(kinds):
    pieces = [
        PieceCost(str(i), "attention_core" if kind == "c" else "block", 1, 1, 1)
        for i, kind in enumerate(kinds)
    ]
    with pytest.raises(ValueError, match="needs other pieces before, between and after"):
        named_plan("helix_naive", CostTable("unit", tuple(pieces)), 1, 1)


def test_the_condition_compares_attention_with_its_longer_message():
    """pre sends 40 bytes, attention 20, at 10 a unit of time and a latency of 1."""
    costs = table(2, 1, 5, 2, Link(1, 10))
    pieces = [
        replace(p, output_bytes={"attention_pre": 40, "attention_core": 20}.get(p.kind, 10))
        for p in costs.pieces
    ]
    costs = replace(costs, pieces=tuple(pieces))
    assert helix.tightest(costs) == ("0/attention", 5, 5, 3)
    assert "t_attention >= t_message to hide its messages, which holds: 5 >= 5 unit" in helix.condition(costs)
    pieces[5] = replace(pieces[5], F=4)
    slower = replace(costs, pieces=tuple(pieces))
    assert helix.tightest(slower).core == "1/attention"
    assert "which does not hold: 4 < 5 unit (forward of 1/attention)" in helix.condition(slower)
    assert helix.tightest(helix.messages_as_published(slower)).message == 1 + 20 / 10
