"""The pipeline against `jax.grad` of the sequential model."""

import functools
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiments.benchmarks.pipelines import (
    SIZES,
    compiled_step,
    lively_params,
    lowered,
    norm_error,
    random_batch,
    run,
    sequential,
    share,
    small_model,
    trace,
    worst_error,
)
from jaxpipe.costs.analytic import analytic_costs
from jaxpipe.models.piece import Model
from jaxpipe.planning.named import named_plan
from jaxpipe.planning.partition import even
from jaxpipe.planning.plan import Action, Plan, Schedule, check
from jaxpipe.planning.schedules import SCHEDULES
from jaxpipe.program.instructions import Name, forms, token_class
from jaxpipe.program.patterns import full_pattern
from jaxpipe.program.program import Op, Signature, fit
from jaxpipe.program.ticks import Channel
from jaxpipe.runtime.mesh import make_mesh
from jaxpipe.runtime.specs import piece_specs

LENGTH = 16
TOLERANCE = 1e-5
MIXED = ("mlp", "mamba", "head")
"""Kinds that recompute where policies are mixed."""


@functools.cache
def expected(family: str, tied: bool, seed: int, microbatches: int, sequences: int = 2):
    """Loss and gradients of the sequential model on a random batch."""
    batch = random_batch(seed, microbatches, sequences, LENGTH)
    loss, grads = _sequential(family, tied)(lively_params(family, tied), batch)
    assert min(np.abs(g).max() for g in jax.tree.leaves(grads)) > 1e-6
    return loss, grads


@functools.cache
def _sequential(family: str, tied: bool):
    return sequential(small_model(family, tied=tied))


def plan_of(
    model: Model, name: str, bounds, schedule: Schedule, microbatches: int, full=(), stage_to_device=None
) -> Plan:
    """A plan by its parts; kinds in `full` recompute."""
    policies = tuple("full" if p.kind in full else "none" for p in model.pieces)
    places = tuple(stage_to_device or range(len(schedule)))
    names = tuple(p.name for p in model.pieces)
    plan = Plan(name, len(schedule), microbatches, names, tuple(bounds), places, policies, schedule)
    check(plan)
    return plan


def split(schedule: Schedule, delay: int) -> Schedule:
    """Every B as I and W; each W waits until `delay` more I of its device have run."""
    rows = []
    for row in schedule:
        actions, waiting = [], []
        for action in row:
            if action.phase == "B":
                actions.append(action._replace(phase="I"))
                waiting.append(action._replace(phase="W"))
                if len(waiting) > delay:
                    actions.append(waiting.pop(0))
            else:
                actions.append(action)
        rows.append((*actions, *waiting))
    return tuple(rows)


def assert_as_sequential(found, wanted, name: str) -> None:
    (loss, grads), (wanted_loss, wanted_grads) = found, wanted
    assert loss == pytest.approx(wanted_loss, rel=TOLERANCE), name
    assert jax.tree.structure(grads) == jax.tree.structure(wanted_grads), name
    assert worst_error(grads, wanted_grads) <= TOLERANCE, name
    assert norm_error(grads, wanted_grads) <= TOLERANCE, name


@pytest.mark.parametrize(
    ("family", "devices", "tied", "phases"),
    [
        ("llama", 1, False, "IW"),
        ("llama", 2, True, "B"),
        ("llama", 4, True, "IW"),
        ("llama", 8, False, "B"),
        ("nemotron_h", 1, True, "B"),
        ("nemotron_h", 2, False, "B"),
        ("nemotron_h", 4, False, "IW"),
        ("nemotron_h", 8, True, "B"),
    ],
)
def test_gradients_equal_the_sequential_ones(family, devices, tied, phases):
    """GPipe and 1F1B; even and uneven partitions; more and fewer micro-batches than devices; recompute."""
    model = small_model(family, tied=tied)
    count, kinds = len(model.pieces), {p.kind for p in model.pieces}
    # All the pieces that can be on the last device; for two devices the cut lies inside an attention layer.
    uneven = (*range(devices), count) if devices != 2 else (0, 3, count)
    # Micro-batches: a multiple of the devices, none, and fewer than they.
    cases = [
        ("gpipe, even", even(count, devices), "gpipe", 8, ()),
        ("1f1b, uneven, recompute", uneven, "1f1b", 7, kinds),
        ("1f1b, even, mixed", even(count, devices), "1f1b", 7, MIXED),
        ("gpipe, uneven, mixed, few", uneven, "gpipe", max(1, devices // 2), MIXED),
        ("1f1b, uneven, few", uneven, "1f1b", max(1, devices // 2), ()),
    ]
    plans = []
    for at, (name, bounds, schedule, microbatches, full) in enumerate(cases):
        rows = SCHEDULES[schedule](devices, microbatches)
        rows = split(rows, delay=2 * (at % 2)) if phases == "IW" else rows
        plans.append(plan_of(model, name, bounds, rows, microbatches, full))
    traced = trace(model, make_mesh(devices), ("none", "full"), 2, LENGTH)
    programs = share([lowered(traced, plan) for plan in plans])
    step, params = compiled_step(traced, programs[0]), lively_params(family, tied)
    for plan, program in zip(plans, programs):
        batch = random_batch(0, plan.microbatches, 2, LENGTH)
        wanted = expected(family, tied, 0, plan.microbatches)
        assert_as_sequential(run(traced, step, program, params, batch), wanted, plan.name)


def test_named_plans_with_several_stages_a_device_or_attention_elsewhere():
    names = ("interleaved_1f1b", "breadth_first", "zb_v", "helix_naive", "helix_two_fold_recompute")
    traced = trace(small_model("llama"), make_mesh(2), ("none", "full"), 2, LENGTH)
    costs = analytic_costs(traced.model, traced.codes, "cpu", traced.dtype.itemsize)
    plans = [named_plan(name, costs, 2, 4) for name in names]
    homes = {
        name: {d for d, row in enumerate(plan.schedule) for action in row if action.stage == 1}
        for name, plan in zip(names, plans)
    }
    assert homes["interleaved_1f1b"] == {1}
    assert homes["helix_naive"] == {0, 1}, "the first attention core runs on both devices"
    programs = share([lowered(traced, plan) for plan in plans])
    step, params, batch = (
        compiled_step(traced, programs[0]),
        lively_params("llama"),
        random_batch(0, 4, 2, LENGTH),
    )
    for plan, program in zip(plans, programs):
        wanted = expected("llama", False, 0, 4)
        assert_as_sequential(run(traced, step, program, params, batch), wanted, plan.name)


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("nemotron_h", False)])
def test_gradients_on_two_by_two_by_two(family, tied):
    model = small_model(family, tp=2, tied=tied)
    plans = [
        plan_of(model, name, bounds, SCHEDULES[name](2, 3), 3, full)
        for name, bounds, full in (
            ("1f1b", even(len(model.pieces), 2), ()),
            ("gpipe", (0, 3, len(model.pieces)), MIXED),
        )
    ]
    traced = trace(model, make_mesh(2, 2, 2), ("none", "full"), 4, LENGTH)
    programs = share([lowered(traced, plan) for plan in plans])
    step, params = compiled_step(traced, programs[0]), lively_params(family, tied)
    wanted = expected(family, tied, 0, 3, 4)
    for plan, program in zip(plans, programs):
        found = run(traced, step, program, params, random_batch(0, 3, 4, LENGTH))
        assert_as_sequential(found, wanted, plan.name)


DEVICES, MOST = 4, 5


@functools.cache
def universal():
    """The traced model, and a step for every plan of `plans` with its signature."""
    model = small_model("nemotron_h", tied=True)
    traced = trace(model, make_mesh(DEVICES), ("none", "full"), 2, LENGTH)
    ops, tokens, operands = set(), Counter(), 0
    for policy in traced.policies:
        pieces = piece_specs(model, traced.codes, (policy,) * len(model.pieces))
        alike, values = Counter(p.kind for p in pieces), set()
        with_params = {p.kind for p in pieces if p.has_params}
        for i, phase in (known := forms(pieces)):
            form, spec = known[i, phase], pieces[i]
            for slot in range(alike[spec.kind] if spec.has_params else 1):
                ops.add(Op(spec.kind, policy, slot, phase, form.kept))
            operands = max(operands, len(form.inputs) + len(form.outputs))
            values.update(form.inputs + form.outputs)
        # Every value may be alive on a device for every micro-batch, and every value may travel anywhere.
        tokens |= Counter(token_class(pieces, (*name, 0)) for name in values)
        travel = {token_class(pieces, (*name, 0)) for name in values if _travels(name)}
    count = 3 * MOST * len(model.pieces)
    channels = tuple(Channel(c, o) for c in sorted(travel) for o in range(1 - DEVICES, DEVICES) if o)
    signature = Signature(
        DEVICES,
        MOST,
        ops=tuple(sorted(ops)),
        slots=tuple(sorted((kind, n) for kind, n in alike.items() if kind in with_params)),
        registers=tuple(sorted((name, MOST * number) for name, number in tokens.items())),
        channels=channels,
        patterns=(full_pattern(channels, DEVICES),),
        ticks=4 * count,
        instructions=count + count // 2,
        operands=operands,
    )
    one = plan_of(model, "any", even(len(model.pieces), DEVICES), SCHEDULES["gpipe"](DEVICES, 1), 1)
    return traced, signature, compiled_step(traced, _fitted(lowered(traced, one), signature))


def _travels(name: Name) -> bool:
    return name[0] in ("value", "cotangent")


def _fitted(program, signature: Signature):
    wider = replace(program, signature=replace(program.signature, microbatches=signature.microbatches))
    return fit(wider, signature)


@st.composite
def plans(draw) -> Plan:
    """Plans of the universal model: any stages anywhere, any valid order, B or I and W, any recompute."""
    model = small_model("nemotron_h", tied=True)
    count, microbatches = len(model.pieces), draw(st.integers(1, MOST))
    cuts = sorted(draw(st.sets(st.integers(1, count - 1), min_size=1)))
    stages = len(cuts) + 1
    places = draw(st.lists(st.integers(0, DEVICES - 1), min_size=stages, max_size=stages))
    fused = draw(st.lists(st.booleans(), min_size=stages, max_size=stages))
    waiting = {}  # action -> actions (I standing for B too) that it comes after
    for stage in range(stages):
        for m in range(microbatches):
            waiting[Action(stage, "F", m)] = {(stage - 1, "F", m)} if stage else set()
            before = {(stage, "F", m)} | ({(stage + 1, "I", m)} if stage < stages - 1 else set())
            waiting[Action(stage, "B" if fused[stage] else "I", m)] = before
            if not fused[stage]:
                waiting[Action(stage, "W", m)] = {(stage, "I", m)}
    rows, done, random = [[] for _ in range(DEVICES)], set(), draw(st.randoms(use_true_random=False))
    while waiting:
        action = random.choice([a for a, needs in waiting.items() if needs <= done])
        del waiting[action]
        done.add(action._replace(phase="I") if action.phase == "B" else action)
        rows[places[action.stage]].append(action)
    full = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    plan = plan_of(model, "random", (0, *cuts, count), tuple(map(tuple, rows)), microbatches, (), places)
    return replace(plan, recompute=tuple("full" if f else "none" for f in full))


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(plans(), st.integers(0, 3))
def test_random_plans_share_one_compiled_step(plan, seed):
    traced, signature, step = universal()
    program = _fitted(lowered(traced, plan), signature)
    batch, params = random_batch(seed, plan.microbatches, 2, LENGTH), lively_params("nemotron_h", True)
    found = run(traced, step, program, params, batch)
    wanted = expected("nemotron_h", True, seed, plan.microbatches)
    assert_as_sequential(found, wanted, str(plan))
    assert step._cache_size() == 1


def forward_rows(devices: int, microbatches: int) -> Schedule:
    return tuple(tuple(Action(s, "F", m) for m in range(microbatches)) for s in range(devices))


@functools.cache
def forward(family: str):
    """A function from a batch of 3 micro-batches to the loss, by a forward program on three devices."""
    model = small_model(family, tied=True)
    plan = Plan(
        "forward",
        3,
        3,
        tuple(p.name for p in model.pieces),
        even(len(model.pieces), 3),
        (0, 1, 2),
        ("none",) * len(model.pieces),
        forward_rows(3, 3),
    )
    traced = trace(model, make_mesh(3), ("forward",), 2, LENGTH)
    program = lowered(traced, plan)
    step = compiled_step(traced, program)
    return lambda batch: run(traced, step, program, lively_params(family, True), batch)


@pytest.mark.parametrize("family", SIZES)
def test_forward_programs_give_the_loss(family):
    loss, grads = forward(family)(random_batch(0, 3, 2, LENGTH))
    assert grads == {}
    assert loss == pytest.approx(expected(family, True, 0, 3)[0], rel=1e-6)


@pytest.mark.parametrize("family", SIZES)
def test_the_loss_is_over_the_valid_tokens_of_the_whole_batch(family):
    batch, loss_of = random_batch(0, 3, 2, LENGTH), forward(family)
    batch["weights"] = np.zeros_like(batch["weights"])
    batch["weights"][0, 0, :2] = batch["weights"][1] = 1  # 2, 32 and no targets that count
    masks = [np.where(np.arange(3)[:, None, None] == m, batch["weights"], 0) for m in (0, 1)]
    first, second = (loss_of(batch | {"weights": mask})[0] for mask in masks)
    whole, _ = loss_of(batch)
    assert whole == pytest.approx((2 * first + 32 * second) / 34, rel=1e-6)
    assert whole != pytest.approx((first + second) / 2, rel=1e-3)


@pytest.mark.parametrize("family", SIZES)
def test_packed_documents_do_not_see_each_other(family):
    batch, loss_of = random_batch(0, 3, 2, LENGTH), forward(family)
    batch["segments"] = np.zeros_like(batch["segments"])
    batch["segments"][..., 6:] = 1
    offsets = np.arange(LENGTH, dtype=np.int32)
    batch["positions"] = np.broadcast_to(np.where(offsets < 6, offsets, offsets - 6), batch["tokens"].shape)
    changed = batch | {"tokens": batch["tokens"].copy()}
    changed["tokens"][..., :6] = (changed["tokens"][..., :6] + 1) % 64
    later = {"weights": np.broadcast_to((offsets >= 6).astype(np.float32), batch["tokens"].shape)}
    assert loss_of(batch | later)[0] == loss_of(changed | later)[0]
    assert loss_of(batch)[0] != loss_of(changed)[0]


@pytest.mark.parametrize("family", SIZES)
def test_bfloat16_is_near_float32(family):
    model = small_model(family, dtype=jnp.bfloat16)
    plan = plan_of(model, "1f1b", even(len(model.pieces), 2), SCHEDULES["1f1b"](2, 3), 3)
    traced = trace(model, make_mesh(2), ("none",), 2, LENGTH, jnp.bfloat16)
    program = lowered(traced, plan)
    params, batch = lively_params(family, False), random_batch(0, 3, 2, LENGTH)
    loss, grads = run(traced, compiled_step(traced, program), program, params, batch)
    wanted_loss, wanted = expected(family, False, 0, 3)
    assert loss == pytest.approx(wanted_loss, rel=1e-2)
    assert 1e-4 < norm_error(grads, wanted) < 5e-2  # 8 bits of precision: neither float32 nor wrong
    assert all(g.dtype == np.float32 for g in jax.tree.leaves(grads))
