"""Counts on a hand-written loop of a GPU program, and on a real program for CPUs."""

import pytest

from jaxpipe.runtime.tick_loop import read_tick_loop, watched_types
from jaxpipe.training.aot import abstract_batch
from jaxpipe.training.prepare import prepare
from jaxpipe.training.state import abstract_state, training_step
from tests.training.runs import tiny_config

FILE, WEIGHT, GRADIENT, STACK = "bf16[9,4]", "bf16[4,6]", "f32[4,6]", "bf16[3,5,7]"
WATCHED = {FILE: None, WEIGHT: 24, GRADIENT: 24, STACK: 35}
CARRY = f"s32[], {FILE}, {WEIGHT}, {GRADIENT}, {STACK}"
START = "%go = ((bf16[4]), bf16[4]) collective-permute-start(%sent), source_target_pairs={{0,1}}"
DONE = "%came = bf16[4] collective-permute-done(%go)"
RUN = f"%ran = ({CARRY}) while(%carry), condition=%more, body=%instruction"


def program(*tick: str, op: str = "", fused: str = "", gradient: str = "%gradient") -> str:
    """A loop whose body does `tick`; its first op does `op`, in a fusion `fused`, and gives `gradient`."""
    lines = "\n  ".join(tick)
    return f"""\
HloModule jit_update, is_scheduled=true

%fused (f0: {STACK}, f1: s32[]) -> bf16[5,7] {{
  %f0 = {STACK} parameter(0)
  %f1 = s32[] parameter(1)
  {fused}
  ROOT %made = bf16[5,7] constant(0)
}}

%multiplied (m0: bf16[4,6], m1: bf16[6,4]) -> bf16[4,4] {{
  %m0 = bf16[4,6] parameter(0)
  %m1 = bf16[6,4] parameter(1)
  ROOT %dot = bf16[4,4] dot(%m0, %m1), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

%first (s0: ({CARRY})) -> ({CARRY}) {{
  %s0 = ({CARRY}) parameter(0)
  %t0 = s32[] get-tuple-element(%s0), index=0
  %file = {FILE} get-tuple-element(%s0), index=1
  %weight = {WEIGHT} get-tuple-element(%s0), index=2
  %gradient = {GRADIENT} get-tuple-element(%s0), index=3
  %stack = {STACK} get-tuple-element(%s0), index=4
  {op}
  %part = bf16[5,7] fusion(%stack, %t0), kind=kLoop, calls=%fused
  %mm = (bf16[4,4], s8[64]) custom-call(%weight, %weight), custom_call_target="__cublas$lt$matmul"
  %norm = bf16[4,4] custom-call(%weight), custom_call_target="__norm"
  %tri = bf16[4,4] fusion(%weight, %weight), kind=kCustom, calls=%multiplied
  ROOT %r0 = ({CARRY}) tuple(%t0, %file, %weight, {gradient}, %stack)
}}

%second (s1: ({CARRY})) -> ({CARRY}) {{
  ROOT %s1 = ({CARRY}) parameter(0)
}}

%third (s2: ({CARRY})) -> ({CARRY}) {{
  ROOT %s2 = ({CARRY}) parameter(0)
}}

%instruction (i0: ({CARRY})) -> ({CARRY}) {{
  %i0 = ({CARRY}) parameter(0)
  %op = s32[] get-tuple-element(%i0), index=0
  ROOT %done = ({CARRY}) conditional(%op, %i0, %i0, %i0), branch_computations={{%first, %second, %third}}
}}

%more (c0: ({CARRY})) -> pred[] {{
  %c0 = ({CARRY}) parameter(0)
  ROOT %yes = pred[] constant(true)
}}

%tick (carry: ({CARRY})) -> ({CARRY}) {{
  %carry = ({CARRY}) parameter(0)
  %held = {FILE} get-tuple-element(%carry), index=1
  %sent = bf16[4] constant(0)
  {lines}
  ROOT %next = ({CARRY}) tuple(%carry)
}}

ENTRY %main (state: ({CARRY})) -> ({CARRY}) {{
  %state = ({CARRY}) parameter(0)
  %outside = {FILE} get-tuple-element(%state), index=1
  %once = {FILE} copy(%outside)
  ROOT %loop = ({CARRY}) while(%state), condition=%more, body=%tick
}}
"""


def second(line: str) -> str:
    """The line about another permute."""
    return line.replace("%go", "%go_2").replace("%came", "%came_2")


def counts(*tick: str, **more: str):
    return read_tick_loop(program(*tick, **more), 3, WATCHED)


def test_clean_loop():
    found = counts(START, RUN, DONE)
    assert found[:5] == ({}, {}, {}, 1, 0), (
        "the copy in the entry computation is made once and does not count"
    )


def test_kernels_and_matmuls_of_each_op():
    first, second, third = counts(START, RUN, DONE).ops
    assert first == (4, 2, {"__cublas$lt$matmul": 1, "__norm": 1})
    assert second == third == (0, 0, {})


@pytest.mark.parametrize(
    ("tick", "op", "kind"),
    [
        (f"%c = {FILE} copy(%held)", "", FILE),
        ("", f"%c = {FILE} copy(%file)", FILE),
        ("", f"%c = ({FILE}, {FILE}, u32[]) copy-start(%file)", FILE),
        ("", f"%c = {WEIGHT} copy(%weight)", WEIGHT),
        ("", "%flat = bf16[36] bitcast(%file)\n  %c = bf16[36] copy(%flat)", FILE),
    ],
)
def test_copies(tick, op, kind):
    assert counts(START, tick, RUN, DONE, op=op).copies == {kind: 1}


def test_copies_of_what_an_op_computed_count_where_they_are_handed_on():
    op = f"%sum = {GRADIENT} add(%gradient, %gradient)\n  %c = {GRADIENT} copy(%sum)"
    assert counts(RUN, op=op, gradient="%c").copies == {GRADIENT: 1}
    assert counts(RUN, op=op, gradient="%sum").copies == {}, "a change of layout on the way to the sum"


def test_slices_and_updates_of_as_much_as_a_weight():
    whole = "%z = s32[] constant(0)\n  %d = bf16[1,5,7] dynamic-slice(%f0, %f1, %z, %z)"
    assert counts(RUN, fused=whole).slices == {STACK: 1}
    part = "%z = s32[] constant(0)\n  %d = bf16[1,1,7] dynamic-slice(%f0, %f1, %z, %z)"
    assert counts(RUN, fused=part).slices == {}
    register = "%z = s32[] constant(0)\n  %d = bf16[1,4] dynamic-slice(%file, %t0, %z)"
    assert counts(RUN, op=register).slices == {}
    update = (
        "%u = bf16[1,5,7] constant(0)\n  %d = bf16[3,5,7] dynamic-update-slice(%stack, %u, %t0, %t0, %t0)"
    )
    assert counts(RUN, op=update)[1:3] == ({}, {STACK: 1})


@pytest.mark.parametrize(
    ("tick", "expected"),
    [
        ((START, RUN, DONE), (1, 0)),
        ((START, DONE, RUN), (0, 1)),
        ((RUN, START, DONE), (0, 1)),
        ((START + ', backend_config={"collective_backend_config":{"is_sync":true}}', RUN, DONE), (0, 1)),
        (("%p = bf16[4] collective-permute(%sent), source_target_pairs={{0,1}}", RUN), (0, 1)),
        ((START, second(START), RUN, DONE, second(DONE)), (2, 0)),
        ((START, RUN, DONE, second(START), second(DONE)), (1, 1)),
    ],
)
def test_permutes(tick, expected):
    found = counts(*tick)
    assert (found.asynchronous, found.synchronous) == expected


def test_no_such_loop():
    with pytest.raises(ValueError, match="no loop around a dispatch over 4 ops"):
        read_tick_loop(program(RUN), 4, WATCHED)
    with pytest.raises(ValueError, match=r"the tick loop carries no array of type f32\[1,2\]"):
        read_tick_loop(program(RUN), 3, WATCHED | {"f32[1,2]": None})


def test_library_calls_inside_fusions():
    call = '%x = f32[4] custom-call(%f0), custom_call_target="__cublas$gemm"'
    assert counts(RUN, fused=call).ops[0] == (
        4,
        3,
        {"__cublas$lt$matmul": 1, "__norm": 1, "__cublas$gemm": 1},
    )


def test_real_program():
    """The backward of a matrix has two matmuls for the forward's one."""
    job = prepare(tiny_config("nowhere", model={"layers": 1}, mesh={"stage": 2}))
    step, arguments = training_step(job)
    text = step.lower(abstract_state(job), abstract_batch(job), *arguments).compile().as_text()
    ops = job.program.signature.ops
    found = read_tick_loop(text, len(ops), watched_types(job.codes, job.program.signature))
    assert len(found.ops) == len(ops)
    assert found[:4] == ({}, {}, {}, 0), "on CPUs all permutes are synchronous"
    assert found.synchronous
    matmuls = {(op.kind, op.phase): code.matmuls for op, code in zip(ops, found.ops)}
    for kind, weights in {"mlp": 3, "attention_pre": 3, "attention_post": 1}.items():
        assert (matmuls[kind, "F"], matmuls[kind, "B"]) == (weights, 2 * weights)
    assert matmuls["attention_core", "F"] == 2
    assert matmuls["attention_core", "B"] == 5, "the scores are made again"
    assert matmuls["head", "B"] == 3


def test_watched_types():
    job = prepare(tiny_config("nowhere", mesh={"stage": 2}, plan={"partition": "even"}, dtype="bfloat16"))
    watched = watched_types(job.codes, job.program.signature)
    weights = {"256,16": 4096, "16,4,8": 512, "16,2,8": 256, "4,8,16": 512, "16,32": 512, "32,16": 512}
    for shape, size in weights.items():
        assert watched[f"bf16[{shape}]"] == watched[f"f32[{shape}]"] == size
    x = dict(job.program.signature.registers)["bfloat16[2,16,16]"]
    assert watched[f"bf16[{x + 1},2,16,16]"] is None
    files = [kind for kind, size in watched.items() if size is None]
    assert len(files) == len(set(files)) == len(watched) - 2 * len(weights)


def test_stacked_slots_are_watched_whole():
    job = prepare(tiny_config("nowhere", mesh={"stage": 1}, plan={"slots": "stacked"}))
    assert watched_types(job.codes, job.program.signature)["f32[2,16,32]"] == 16 * 32
