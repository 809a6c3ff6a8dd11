from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.planning.plan import Action
from jaxpipe.program.program import Op, bucket, fit, lower, slots_by_kind, union
from jaxpipe.program.verify import verify
from tests.program.interpreter import interpret
from tests.program.toys import (
    named_plan,
    random_kinds,
    random_plan,
    random_program,
    random_styles,
    sequential,
    toy_plan,
    toy_specs,
)

randoms = st.integers(0, 2**32 - 1).map(Random)
BLOCKS = toy_specs(["embed"] + ["block"] * 6 + ["head"], ["residuals"] * 8)


@settings(deadline=None, max_examples=60)
@given(randoms)
def test_a_program_computes_what_the_model_means(random):
    plan, specs, program = random_program(random)
    verify(program, specs)
    assert interpret(program, specs) == sequential(specs, plan.microbatches)


@settings(deadline=None, max_examples=30)
@given(randoms)
def test_forward_programs_compute_the_loss_alone(random):
    plan, specs, program = random_program(random, forward_only=True)
    verify(program, specs)
    assert {op.phase for op in program.signature.ops} == {"F"}
    assert interpret(program, specs) == sequential(specs, plan.microbatches, forward_only=True)


@settings(deadline=None, max_examples=30)
@given(randoms)
def test_programs_of_one_model_fit_their_union(random):
    kinds = random_kinds(random)
    specs = toy_specs(kinds, random_styles(random, kinds))
    programs = [lower(random_plan(random, specs), specs) for _ in range(6)]
    groups = {}
    for program in programs:
        sig = program.signature
        groups.setdefault((sig.devices, sig.microbatches), []).append(program)
    for (_, microbatches), group in groups.items():
        shared = union([program.signature for program in group])
        for program in group:
            fitted = fit(program, shared)
            assert fitted.signature == shared
            verify(fitted, specs)
            assert interpret(fitted, specs) == sequential(specs, microbatches)
            for name, table in fitted.tables().items():
                assert table.dtype == np.int32, name


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_usual_schedules(schedule, devices):
    program = lower(named_plan(BLOCKS, schedule, devices, 6), BLOCKS)
    verify(program, BLOCKS)
    assert interpret(program, BLOCKS) == sequential(BLOCKS, 6)


def test_ops_of_a_program_by_hand():
    specs = toy_specs(("embed", "pre", "core", "post", "block", "head"), ["residuals"] * 6)
    program = lower(named_plan(specs, "gpipe", 2, 2), specs)
    names = [("block", ()), ("core", ()), ("embed", ()), ("post", ()), ("pre", ("x",))]
    expected = [Op(k, "residuals", 0, p, kept if p == "B" else ()) for k, kept in names for p in "BF"]
    assert program.signature.ops == tuple(sorted([*expected, Op("head", "residuals", 0, "B", ())]))


def test_slots_number_the_pieces_of_a_kind_on_a_device():
    plan = toy_plan(BLOCKS, (0, 2, 3, 5, 8), (1, 0, 1, 0), 2, 1, ((), ()))
    assert slots_by_kind(plan, BLOCKS) == {
        "embed": ((), (0,)),
        "block": ((2, 5, 6), (1, 3, 4)),
        "head": ((7,), ()),
    }


def test_bucket_rounds_up_to_four_steps_a_doubling():
    assert [bucket(n) for n in range(9)] == list(range(9))
    assert [bucket(n) for n in (9, 10, 11, 15, 16, 17, 21, 33, 1000)] == [
        10,
        10,
        12,
        16,
        16,
        20,
        24,
        40,
        1024,
    ]
    for n in range(1, 3000):
        assert n <= bucket(n) <= 1.25 * n + 1
        assert bucket(bucket(n)) == bucket(n)


def test_union_needs_equal_slots():
    plan = named_plan(BLOCKS, "gpipe", 2, 2)
    signatures = [lower(plan, BLOCKS, stacked=stacked).signature for stacked in (False, True)]
    with pytest.raises(ValueError, match="stacked in one program and static in another"):
        union(signatures)


def test_union_needs_equal_devices_and_microbatches():
    signatures = [lower(named_plan(BLOCKS, "gpipe", p, m), BLOCKS).signature for p, m in ((2, 2), (2, 3))]
    with pytest.raises(ValueError, match="equal devices and micro-batches"):
        union(signatures)


def test_a_program_does_not_fit_a_narrower_signature():
    gpipe, one_f_one_b = (lower(named_plan(BLOCKS, name, 4, 8), BLOCKS) for name in ("gpipe", "1f1b"))
    with pytest.raises(ValueError, match="does not fit the signature; fit it to their union"):
        fit(gpipe, one_f_one_b.signature)


def test_a_plan_for_other_pieces_is_refused():
    plan = named_plan(BLOCKS, "gpipe", 2, 2)
    with pytest.raises(ValueError, match="the plan has 8 pieces, the model 7"):
        lower(plan, BLOCKS[:-1])
    renamed = [replace(s, name="other") if i == 3 else s for i, s in enumerate(BLOCKS)]
    with pytest.raises(ValueError, match="piece 3 is '3/block' in the plan and 'other' in the model"):
        lower(plan, renamed)


def test_a_plan_for_other_recompute_policies_is_refused():
    plan = replace(named_plan(BLOCKS, "gpipe", 2, 2), recompute=("full",) * 8)
    with pytest.raises(ValueError, match="'0/embed' has policy 'full' in the plan, code for 'residuals'"):
        lower(plan, BLOCKS)


def test_a_piece_with_parameters_stays_on_its_device():
    plan = named_plan(BLOCKS, "gpipe", 2, 2)
    rows = [list(row) for row in plan.schedule]
    rows[0].remove(Action(0, "F", 1))
    rows[1].append(Action(0, "F", 1))
    message = "action 0F1 stands on device 1, the parameters of '0/embed' on 0"
    with pytest.raises(ValueError, match=message):
        lower(replace(plan, schedule=tuple(map(tuple, rows))), BLOCKS)
