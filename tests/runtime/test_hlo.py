import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxpipe.runtime.hlo import Place, element_count, parse, tuple_types

TEXT = """\
HloModule toy, is_scheduled=true, entry_computation_layout={(f32[2,3]{1,0})->f32[2,3]{1,0}}

%write (p0: f32[2,3], p1: f32[3], p2: s32[]) -> f32[2,3] {
  %p0 = f32[2,3]{1,0} parameter(0)
  %p1 = f32[3]{0} parameter(1)
  %row = f32[1,3]{1,0} bitcast(%p1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %dus = f32[2,3]{1,0} dynamic-update-slice(%p0, %row, %p2, %zero)
}

%left (state.1: (s32[], f32[2,3], f32[3])) -> (s32[], f32[2,3], f32[3]) {
  %state.1 = (s32[], f32[2,3]{1,0}, /*index=2*/f32[3]{0}) parameter(0)
  %file.1 = f32[2,3]{1,0} get-tuple-element(%state.1), index=1
  %new = f32[3]{0} constant({1, 2, 3})
  %t.1 = s32[] get-tuple-element(%state.1), index=0
  %written = f32[2,3]{1,0} fusion(%file.1, %new, %t.1), kind=kLoop, calls=%write
  ROOT %tuple.1 = (s32[], f32[2,3]{1,0}, f32[3]{0}) tuple(%t.1, %written, %new)
}

%right (state.2: (s32[], f32[2,3], f32[3])) -> (s32[], f32[2,3], f32[3]) {
  ROOT %state.2 = (s32[], f32[2,3]{1,0}, f32[3]{0}) parameter(0)
}

%body (carry: (s32[], f32[2,3], f32[3])) -> (s32[], f32[2,3], f32[3]) {
  %carry = (s32[], f32[2,3]{1,0}, f32[3]{0}) parameter(0)
  %t = s32[] get-tuple-element(%carry), index=0
  %chosen = (s32[], f32[2,3], f32[3]) conditional(%t, %carry, %carry), branch_computations={%left, %right}
  %after = f32[2,3]{1,0} get-tuple-element(%chosen), index=1, metadata={op_name="calls=%nothing (at all)"}
  %kept = f32[2,3]{0,1} copy(%after)
  %made = f32[3]{0} get-tuple-element(%chosen), index=2
  ROOT %next = (s32[], f32[2,3]{1,0}, f32[3]{0}) tuple(%t, %after, %made)
}

%go (carry.1: (s32[], f32[2,3], f32[3])) -> pred[] {
  %carry.1 = (s32[], f32[2,3]{1,0}, f32[3]{0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (a: f32[2,3]) -> f32[2,3] {
  %a = f32[2,3]{1,0} parameter(0)
  %b = f32[3]{0} constant({1, 2, 3})
  %i = s32[] constant(0)
  %start = (s32[], f32[2,3]{1,0}, f32[3]{0}) tuple(%i, %a, %b)
  %loop = (s32[], f32[2,3]{1,0}, f32[3]{0}) while(%start), condition=%go, body=%body
  ROOT %out = f32[2,3]{1,0} get-tuple-element(%loop), index=1
}
"""
LOOP = Place("main", "loop")


def test_reads_computations_and_instructions():
    module = parse(TEXT)
    assert list(module.computations) == ["write", "left", "right", "body", "go", "main"]
    assert module.entry == "main"
    assert module.roots["left"] == "tuple.1"
    assert module.roots["right"] == "state.2"
    written = module.computations["left"]["written"]
    assert (written.type, written.opcode, written.operands) == (
        "f32[2,3]",
        "fusion",
        ("file.1", "new", "t.1"),
    )
    assert written.called == (("calls", "write"),)
    assert module.computations["body"]["chosen"].called == (("branch", "left"), ("branch", "right"))
    assert module.computations["main"]["loop"].called == (("condition", "go"), ("body", "body"))
    assert module.computations["left"]["state.1"].type == "(s32[], f32[2,3], f32[3])"
    assert module.computations["body"]["after"].called == (), "names in metadata are not calls"


def test_reachable_with_and_without_fusions():
    module = parse(TEXT)
    assert set(module.reachable("body")) == {"body", "left", "right", "write"}
    assert set(module.reachable("body", through_fusions=False)) == {"body", "left", "right"}
    assert set(module.reachable("main")) == set(module.computations)


@pytest.mark.parametrize(
    ("computation", "name", "element"),
    [
        ("body", "t", 0),
        ("body", "after", 1),  # through both branches: passed on, and written in place by a fusion
        ("body", "kept", 1),
        ("left", "file.1", 1),
        ("left", "written", 1),
        ("write", "p0", 1),
        ("write", "row", None),
        ("write", "p1", None),  # made in the branch
        ("body", "made", 2),  # one branch makes it, the other passes it on
        ("go", "true", None),
    ],
)
def test_carried_by(computation, name, element):
    assert parse(TEXT).carried_by(LOOP, computation, name) == element


def test_no_module():
    with pytest.raises(ValueError, match="the text is no HLO module: it has no ENTRY computation"):
        parse("HloModule nothing\n")


def test_types():
    assert tuple_types("(s32[], f32[2,3], bf16[1,4])") == ["s32[]", "f32[2,3]", "bf16[1,4]"]
    assert element_count("f32[2,3]") == 6
    assert element_count("bf16[]") == 1


def test_real_program_of_nested_loops():
    def inner(i, pair):
        file, total = pair
        return lax.cond(
            i % 2 == 0,
            lambda: (lax.dynamic_update_index_in_dim(file, jnp.sin(file[0]) + i, i % 4, 0), total),
            lambda: (file, total + file.sum()),
        )

    def outer(t, pair):
        return lax.fori_loop(0, t, inner, pair)

    step = jax.jit(lambda file, n: lax.fori_loop(0, n, outer, (file, jnp.float32(0))))
    module = parse(step.lower(jnp.ones((4, 33)), 3).compile().as_text())
    ((where, loop),) = [
        (c, i)
        for c, i in module.instructions(module.reachable(module.entry, through_fusions=False))
        if i.opcode == "while"
        and any(j.opcode == "while" for _, j in module.instructions(_inside(module, i)))
    ]
    carry = tuple_types(loop.type)
    slices = [
        (c, i)
        for c, i in module.instructions(_inside(module, loop))
        if i.opcode == "dynamic-update-slice" and i.type == "f32[4,33]"
    ]
    assert slices
    for computation, instruction in slices:
        element = module.carried_by(Place(where, loop.name), computation, instruction.name)
        assert carry[element] == "f32[4,33]"


def _inside(module, loop):
    (body,) = (c for role, c in loop.called if role == "body")
    return module.reachable(body)
