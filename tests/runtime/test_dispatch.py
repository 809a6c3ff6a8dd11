"""Stacked parameter slots and several patterns of permutes give the gradients of the sequential model."""

import numpy as np
import pytest

from experiments.benchmarks.pipelines import (
    compiled_step,
    lively_params,
    random_batch,
    run,
    sequential,
    small_model,
    trace,
    worst_error,
)
from jaxpipe.planning.partition import even
from jaxpipe.planning.plan import Plan
from jaxpipe.planning.schedules import SCHEDULES
from jaxpipe.program.program import lower
from jaxpipe.program.verify import verify
from jaxpipe.runtime.executor import program_arguments
from jaxpipe.runtime.layout import make_layout, to_slots
from jaxpipe.runtime.mesh import make_mesh
from jaxpipe.runtime.specs import piece_specs

MICROBATCHES = 6


def setting(devices, microbatches=MICROBATCHES):
    """(traced model, pieces, a 1F1B plan of it)."""
    traced = trace(small_model("llama"), make_mesh(devices), ("none",), 1, 16)
    names = tuple(p.name for p in traced.model.pieces)
    pieces = piece_specs(traced.model, traced.codes, ("none",) * len(names))
    schedule, bounds = SCHEDULES["1f1b"](devices, microbatches), even(len(names), devices)
    policies, places = ("none",) * len(names), tuple(range(devices))
    return traced, pieces, Plan("p", devices, microbatches, names, bounds, places, policies, schedule)


@pytest.fixture(scope="module")
def expected():
    batch = random_batch(0, MICROBATCHES, 1, 16)
    return batch, sequential(small_model("llama"))(lively_params("llama"), batch)


def check(traced, program, expected):
    batch, (loss, grads) = expected
    found_loss, found = run(traced, compiled_step(traced, program), program, lively_params("llama"), batch)
    np.testing.assert_allclose(found_loss, loss, rtol=1e-6)
    assert worst_error(found, grads) < 1e-5


def test_stacked_slots(expected):
    traced, pieces, plan = setting(1)
    static, program = (lower(plan, pieces, stacked=s) for s in (False, True))
    verify(program, pieces)
    assert max(count for _, count in program.signature.slots) > 1
    assert len(program.signature.ops) < len(static.signature.ops)
    check(traced, program, expected)


@pytest.mark.parametrize("patterns", [2, 6])
def test_several_patterns(expected, patterns):
    traced, pieces, plan = setting(4)
    program = lower(plan, pieces, patterns=patterns)
    verify(program, pieces)
    assert 2 <= len(program.signature.patterns) <= patterns
    check(traced, program, expected)


def test_micro_batches_are_data():
    """The step for 256 micro-batches is as long as the step for 8."""
    lengths = []
    for microbatches in (8, 256):
        traced, pieces, plan = setting(4, microbatches)
        program = lower(plan, pieces)
        layout = make_layout(traced.model, program)
        arguments = program_arguments(program, traced.model, layout)
        slots, batch = (
            to_slots(traced.model, layout, lively_params("llama")),
            random_batch(0, microbatches, 1, 16),
        )
        tables, length, ties = arguments
        step = compiled_step(traced, program)
        text = step.lower(slots, batch, tables, length, {"nll": np.float32(1)}, ties).as_text()
        lengths.append(len(text.splitlines()))
    assert lengths[1] == pytest.approx(lengths[0], rel=0.01)
