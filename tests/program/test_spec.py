from jaxpipe.program.spec import PhaseSpec, PieceSpec, operands, register_class

SPEC = PieceSpec(
    name="mlp",
    kind="mlp",
    policy="none",
    has_params=True,
    reads={"x": 0, "s": 1},
    writes=("x",),
    classes={"x": "wide", "s": "narrow"},
    phases={
        "F": PhaseSpec(("x", "s"), ("x",), residuals=True),
        "B": PhaseSpec(("s",), ("x",), residuals=True, cotangents=("x",)),
        "I": PhaseSpec(("s",), residuals=True, stash=True, cotangents=("x",)),
        "W": PhaseSpec(("s",), residuals=True, stash=True),
    },
    residual_class="r",
    stash_class="t",
)


def test_operands_of_each_phase():
    r, t, x, s = ("residuals", ""), ("stash", ""), ("read", "x"), ("read", "s")
    out = [("ct_read", "x"), ("ct_read", "s")]
    assert operands(SPEC, "F", ()) == ([x, s], [("write", "x"), r])
    assert operands(SPEC, "B", ("s",)) == ([s, ("write", "x"), r, ("ct_write", "x"), ("kept", "s")], out)
    assert operands(SPEC, "I", ()) == ([s, r, ("ct_write", "x")], [*out, t])
    assert operands(SPEC, "W", ()) == ([s, r, t], [])


def test_cotangents_live_in_the_class_of_their_value():
    whats = ("read", "write", "ct_write", "ct_read", "kept")
    assert {register_class(SPEC, (what, "x")) for what in whats} == {"wide"}
    assert register_class(SPEC, ("kept", "s")) == "narrow"
    assert register_class(SPEC, ("residuals", "")) == "r"
    assert register_class(SPEC, ("stash", "")) == "t"
