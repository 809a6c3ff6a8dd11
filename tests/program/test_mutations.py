import functools
from collections import Counter
from random import Random

import pytest

from jaxpipe.program.program import lower
from jaxpipe.program.verify import verify
from tests.program.interpreter import interpret
from tests.program.mutations import MUTATIONS, differs, with_patterns
from tests.program.toys import named_plan, random_plan, random_program, sequential, toy_specs

EACH = 40
"""Mutations of each kind."""
ATTENTION = ("embed", "pre", "core", "post", "block", "pre", "core", "post", "block", "head")
SIDES = ("embed", "side", "use", "side", "block", "use", "rotate", "block", "head")


@functools.cache
def programs():
    """(specs, program, gradients and loss by the sequential model) of some small models and plans."""
    blocks, attention = toy_specs(["embed"] + ["block"] * 6 + ["head"], ["residuals"] * 8), None
    attention = toy_specs(ATTENTION, ["residuals", "reads", "writes", "no stash", "residuals"] * 2)
    sides, random = toy_specs(SIDES, ["reads"] * 9), Random(0)
    anywhere = toy_specs(SIDES, ["residuals"] * 9)
    named = [
        (blocks, lower(named_plan(blocks, "gpipe", 1, 3), blocks)),
        (blocks, lower(named_plan(blocks, "1f1b", 4, 5), blocks)),
        (blocks, lower(named_plan(blocks, "zb_h1", 3, 4), blocks, stacked=True)),
        (attention, lower(named_plan(attention, "1f1b_split", 4, 3), attention)),
        (sides, lower(named_plan(sides, "gpipe_split", 2, 2), sides, stacked=True)),
        (anywhere, lower(random_plan(random, anywhere), anywhere, stacked=True)),
        random_program(random, forward_only=True)[1:],
        *(random_program(random)[1:] for _ in range(5)),
    ]
    patterned = [
        (specs, with_patterns(program, most)) for (specs, program), most in zip(named[1:6], (9, 3, 2, 9, 4))
    ]
    return [(specs, program, _expected(specs, program)) for specs, program in named + patterned]


def _expected(specs, program):
    return sequential(specs, program.signature.microbatches, forward_only=specs[0].policy == "forward")


def outcome(mutate, random):
    """Of one mutation of one program: unchanged, rejected, the same or wrong."""
    specs, program, expected = random.choice(programs())
    changed = mutate(program, specs, random)
    if not differs(program, changed):
        return "unchanged"
    try:
        verify(changed, specs)
    except ValueError:
        return "rejected"
    return "same" if interpret(changed, specs) == expected else "wrong"


def test_the_programs_are_right():
    for specs, program, expected in programs():
        verify(program, specs)
        assert interpret(program, specs) == expected


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda f: f.__name__)
def test_a_changed_program_is_rejected_or_means_the_same(mutate):
    random, found = Random(mutate.__name__), Counter()
    while found.total() - found["unchanged"] < EACH:
        found[outcome(mutate, random)] += 1
    assert found["wrong"] == 0
    assert found["rejected"] > 0
