from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.program.program import lower
from jaxpipe.program.verify import verify
from tests.program.toys import (
    interpret,
    named_plan,
    random_kinds,
    random_plan,
    random_styles,
    sequential,
    toy_specs,
)

randoms = st.randoms(use_true_random=False)


def random_program(random: Random, forward_only: bool = False):
    kinds = random_kinds(random)
    specs = toy_specs(kinds, random_styles(random, kinds), forward_only)
    plan = random_plan(random, specs, forward_only)
    return plan, specs, lower(plan, specs)


@settings(deadline=None, max_examples=60)
@given(randoms)
def test_a_lowered_plan_passes_and_computes_what_the_model_means(random):
    plan, specs, program = random_program(random)
    verify(program, specs)
    assert interpret(program, specs) == sequential(specs, plan.microbatches)
