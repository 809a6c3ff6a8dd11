from jaxpipe.planning.plan import Action
from jaxpipe.program.instructions import expand, forms, instruction, token_class
from tests.program.toys import toy_plan, toy_specs

KINDS = ("embed", "side", "use", "pre", "core", "use", "post", "head")
#         0        1       2      3      4       5      6       7
SPECS = toy_specs(KINDS, ["residuals"] * len(KINDS))


def test_cotangents_of_a_value_pass_from_reader_to_reader():
    """x of 0 is read by 1 and 2, s of 1 by 2 and 5, x of 2 by 3 and 5, the rest once."""
    known = forms(SPECS)
    kept = {i: known[i, "B"].kept for i in range(len(SPECS))}
    assert kept == {0: (), 1: ("x",), 2: ("s",), 3: ("x",), 4: (), 5: (), 6: (), 7: ()}
    taken = {i: [n for n in known[i, "B"].inputs if n[0] == "cotangent"] for i in range(len(SPECS))}
    assert taken == {
        0: [("cotangent", 1, "x")],
        1: [("cotangent", 2, "s"), ("cotangent", 2, "x")],
        2: [("cotangent", 3, "x"), ("cotangent", 5, "s")],
        3: [("cotangent", 4, "q"), ("cotangent", 4, "k"), ("cotangent", 5, "x")],
        4: [("cotangent", 6, "o")],
        5: [("cotangent", 6, "x")],
        6: [("cotangent", 7, "x")],
        7: [],
    }
    assert known[2, "B"].outputs == (("cotangent", 2, "s"), ("cotangent", 2, "x"))


def test_forward_reads_the_latest_writer():
    known = forms(SPECS)
    assert known[5, "F"].inputs == (("value", 1, "s"), ("value", 2, "x"))
    assert known[5, "F"].outputs == (("value", 5, "x"), ("residuals", 5, ""))


def test_phases_with_nothing_to_do_have_no_form():
    known = forms(SPECS)
    assert {phase for i, phase in known if i == 7} == {"B", "I"}  # a sink works in its backward
    assert {phase for i, phase in known if i == 4} == {"F", "B", "I"}  # no parameters, no W
    assert {phase for i, phase in known if i == 0} == {"F", "B", "I", "W"}


def test_instruction_adds_the_microbatch():
    x = instruction(forms(SPECS)[4, "F"], 3)
    assert x.inputs == (("value", 3, "q", 3), ("value", 3, "k", 3))
    assert x.outputs == (("value", 4, "o", 3), ("residuals", 4, "", 3))
    assert [token_class(SPECS, t) for t in (*x.inputs, *x.outputs)] == [
        "wide",
        "narrow",
        "wide",
        "core/residuals/residuals",
    ]


def test_expand_runs_backwards_through_a_stage_and_leaves_out_empty_actions():
    # Stages: pieces 0-3, the attention 4, pieces 5-6, the head 7.
    rows = [[(s, "F", 0) for s in range(4)] + [(s, p, 0) for s in (3, 2, 1, 0) for p in "IW"]]
    schedule = tuple(tuple(Action(*a) for a in row) for row in rows)
    plan = toy_plan(SPECS, (0, 4, 5, 7, 8), (0, 0, 0, 0), 1, 1, schedule)
    (row,) = expand(plan, SPECS)
    assert [[(x.form.phase, x.form.piece) for x in action] for action in row] == [
        [("F", 0), ("F", 1), ("F", 2), ("F", 3)],
        [("F", 4)],
        [("F", 5), ("F", 6)],
        [("I", 7)],
        [("I", 6), ("I", 5)],
        [("W", 6), ("W", 5)],
        [("I", 4)],
        [("I", 3), ("I", 2), ("I", 1), ("I", 0)],
        [("W", 3), ("W", 2), ("W", 1), ("W", 0)],
    ]
