from dataclasses import replace

import pytest

from jaxpipe.program.program import lower
from jaxpipe.program.spec import PhaseSpec, PieceSpec
from jaxpipe.program.verify import verify
from tests.program.toys import named_plan, toy_specs


def small(kinds=("embed", "block", "block", "head"), styles=None, devices=1, microbatches=2):
    specs = toy_specs(kinds, styles or ["residuals"] * len(kinds))
    return specs, lower(named_plan(specs, "gpipe", devices, microbatches), specs)


def with_op(program, old, new):
    """`program` with one op taken for another."""
    ops = tuple(new if op == old else op for op in program.signature.ops)
    return replace(program, signature=replace(program.signature, ops=ops))


def test_names_tick_device_and_instruction():
    specs, program = small()
    program.microbatch[0, 1] = 1
    message = (
        r"tick 0, device 0, instruction 1 \(F of block, micro-batch 1\) "
        r"reads \[\('value', 0, 'x', 0\)\]; expected \[\('value', 0, 'x', 1\)\]"
    )
    with pytest.raises(ValueError, match=message):
        verify(program, specs)


def test_a_phase_that_never_runs_is_found():
    specs, program = small()
    program.count[0, program.length - 1] -= 1  # leaves out the last B of the embedding
    with pytest.raises(ValueError, match=r"piece '0/embed', micro-batch 1: phases ran .*'B': 0"):
        verify(program, specs)


def test_the_kept_values_of_an_op_must_be_those_of_the_wiring():
    specs, program = small(("embed", "pre", "core", "post", "head"))
    op = next(op for op in program.signature.ops if (op.kind, op.phase) == ("pre", "B"))
    assert op.kept == ("x",)
    with pytest.raises(ValueError, match="B of pre"):
        verify(with_op(program, op, op._replace(kept=())), specs)


def test_an_op_must_have_the_policy_of_its_piece():
    specs, program = small(("embed", "block", "block", "head"), ("reads", "reads", "writes", "reads"))
    mine, other_policy = (op for op in program.signature.ops if (op.kind, op.phase) == ("block", "F"))
    with pytest.raises(ValueError, match="F of block"):
        verify(with_op(program, mine, other_policy._replace(slot=mine.slot)), specs)


def test_the_spare_register_is_for_arrivals_only():
    specs, program = small(("embed", "block", "head"), devices=3)
    spare = dict(program.signature.registers)["wide"]
    program.operands[0, 0, 0] = spare
    with pytest.raises(ValueError, match=rf"names register wide\[{spare}\] of {spare}"):
        verify(program, specs)


def test_two_arrivals_in_one_register_are_found():
    specs, program = small(("embed", "pre", "core", "post", "head"), devices=5)
    # Channels of one class: offsets 1 and -1 and more. Let two of them write register 0 of device 1.
    same = [c for c, x in enumerate(program.signature.channels) if x.register_class == "wide"]
    program.receive[1, same[:2], 0] = 0
    with pytest.raises(ValueError, match=r"two messages arrive in register wide\[0\] of device 1"):
        verify(program, specs)


def test_pieces_that_read_nothing_and_have_no_parameters_are_counted_apart():
    """Two such pieces of one kind look alike to the tables; each must run once a micro-batch."""
    phases = {"F": PhaseSpec((), ("s",)), "B": PhaseSpec(), "I": PhaseSpec()}
    position = PieceSpec("p", "position", "none", False, {}, ("s",), {"s": "narrow"}, phases)
    kinds = ("embed", "side", "use", "side", "use", "head")
    specs = toy_specs(kinds, ["none"] * 6)
    specs[1], specs[3] = replace(position, name="1"), replace(position, name="3")
    program = lower(named_plan(specs, "gpipe", 1, 2), specs)
    verify(program, specs)
