"""Each fault that needs no run to be seen."""

from dataclasses import replace

import numpy as np
import pytest

from jaxpipe.program.check import check_program
from jaxpipe.program.program import lower
from tests.program.toys import named_plan, toy_specs

SPECS = toy_specs(("embed", "block", "block", "block", "head"), ["residuals"] * 5)


def small(stacked=False):
    """Two blocks on device 0, one on device 1."""
    return lower(named_plan(SPECS, "gpipe", 2, 3), SPECS, stacked)


def signed(program, **changes):
    """`program` with another signature."""
    return replace(program, signature=replace(program.signature, **changes))


def assert_refused(program, message):
    with pytest.raises(ValueError, match=message):
        check_program(program, SPECS)


@pytest.mark.parametrize("table", ["first", "count", "op", "microbatch", "send", "receive", "pattern"])
@pytest.mark.parametrize("value", [-1, 1000])
def test_numbers_out_of_range(table, value):
    program = small()
    entry = getattr(program, table)
    entry[(0,) * entry.ndim] = value
    assert_refused(program, rf"table '{table}' holds {value} at \(0, 0")


@pytest.mark.parametrize("table", ["first", "op", "slot", "operands", "receive", "pattern"])
def test_tables_of_another_shape(table):
    program = small()
    narrow = getattr(program, table)[..., :-1]
    assert_refused(replace(program, **{table: narrow}), f"table '{table}' has shape .* the signature says")


def test_slots_of_pieces():
    program = small()
    assert program.slots["block"] == ((1,), (2, 3))
    for rows, message in [
        (((1,), (2, 3), ()), "slots of kind 'block' are given for 3 devices of 2"),
        (((1,),), "slots of kind 'block' are given for 1 devices of 2"),
        (((1, 2, 3), ()), "device 0 holds 3 pieces of kind 'block' in 2 slots"),
        (((1, 2), (2, 3)), "piece '2/block' is in 2 parameter slots; expected one"),
        (((1,), (2,)), "piece '3/block' is in 0 parameter slots; expected one"),
        (((1, 4), (2, 3)), "device 0 holds piece 4 in a slot of kind 'block'; it is none"),
        (((1, 5), (2, 3)), "device 0 holds piece 5"),
        (((1, -1), (2, 3)), "device 0 holds piece -1"),
    ]:
        assert_refused(replace(program, slots=program.slots | {"block": rows}), message)
    without = {kind: rows for kind, rows in program.slots.items() if kind != "head"}
    assert_refused(replace(program, slots=without), "slots of kind 'head' are given for 0 devices of 2")


@pytest.mark.parametrize("stacked", [False, True])
def test_fewer_slots_than_pieces(stacked):
    """A read past the end of a stack gives its last entry: the wrong parameters, without an error."""
    program = small(stacked)
    counts = tuple((k, 1) for k, _ in program.signature.slots)
    message = (
        "device 1 holds 2 pieces of kind 'block' in 1 slots" if stacked else "uses parameter slot 1 of 1"
    )
    assert_refused(signed(program, slots=counts), message)


def test_ops_that_cannot_be_compiled():
    program = small()
    ops = program.signature.ops
    block = next(op for op in ops if op.kind == "block")
    for change, message in [
        ({"kind": "side"}, "no piece of the model has the code of"),
        ({"policy": "reads"}, "no piece of the model has the code of"),
        ({"phase": "W", "kind": "head"}, "no piece of the model has the code of"),
        ({"kept": ("q",)}, "no piece of the model has the code of"),
        ({"slot": 2}, "uses parameter slot 2 of 2"),
        ({"slot": None}, "some ops of kind 'block' name their slot, others leave it to the table"),
    ]:
        assert_refused(signed(program, ops=(*ops, block._replace(**change))), message)


def test_registers_and_operands_that_the_ops_need():
    program = small()
    registers = program.signature.registers
    no_bundles = tuple(r for r in registers if r[0] != "block/residuals/residuals")
    assert_refused(signed(program, registers=no_bundles), "registers of class 'block/residuals/residuals'")
    no_values = tuple(r for r in registers if r[0] != "wide")
    assert_refused(signed(program, registers=no_values), "no registers of that class")
    narrow = replace(program, operands=program.operands[..., :1])
    assert_refused(signed(narrow, operands=1), "operands in a table of 1")


def test_patterns_that_no_permute_can_do():
    program = small()
    forth, back = program.signature.patterns[0]
    assert {forth, back} == {(0,), (1,)}
    for pattern, message in [
        ((forth,), "pattern 1 is for 1 channels, not 2"),
        ((back, forth), "sends from .* where nobody is"),
        (((2,), ()), "sends from .2,. over .* where nobody is"),
        ((forth * 2, back), "sends twice from one of"),
    ]:
        patterns = (program.signature.patterns[0], pattern)
        assert_refused(signed(program, patterns=patterns), message)


def test_more_ticks_than_the_tables_have():
    program = small()
    longer = program.signature.ticks + 1
    assert_refused(
        replace(program, length=longer), f"the program has {longer} ticks in tables of {longer - 1}"
    )
    assert_refused(replace(program, length=-1), "the program has -1 ticks")


def test_empty_patterns_are_fine():
    program = small()
    empty = tuple(() for _ in program.signature.channels)
    check_program(signed(program, patterns=(*program.signature.patterns, empty)), SPECS)
    assert np.all(program.pattern == 0)
