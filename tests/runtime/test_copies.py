"""What the compiler makes of the tick loop, read off the compiled program."""

import numpy as np
import pytest

from experiments.benchmarks.pipelines import (
    compiled_step,
    lively_params,
    lowered,
    random_batch,
    small_model,
    trace,
)
from jaxpipe.planning.partition import even
from jaxpipe.planning.plan import Plan
from jaxpipe.planning.schedules import SCHEDULES
from jaxpipe.runtime.executor import program_arguments
from jaxpipe.runtime.layout import make_layout, to_slots
from jaxpipe.runtime.mesh import make_mesh
from jaxpipe.runtime.tick_loop import read_tick_loop, watched_types


# One device is a case of its own: no message orders reads before writes there.
@pytest.mark.parametrize("family", ["llama", "nemotron_h"])
@pytest.mark.parametrize("devices", [1, 2])
def test_no_register_file_or_gradient_is_copied_in_the_tick_loop(family, devices):
    model = small_model(family)
    names = tuple(p.name for p in model.pieces)
    plan = Plan(
        "1f1b",
        devices,
        5,
        names,
        even(len(names), devices),
        tuple(range(devices)),
        ("none",) * len(names),
        SCHEDULES["1f1b"](devices, 5),
    )
    traced = trace(model, make_mesh(devices), ("none",), 2, 16)
    program = lowered(traced, plan)
    layout = make_layout(model, program)
    tables, length, ties = program_arguments(program, model, layout)
    slots = to_slots(model, layout, lively_params(family))
    step = compiled_step(traced, program)
    batch = random_batch(0, 5, 2, 16)
    text = step.lower(slots, batch, tables, length, {"nll": np.float32(1)}, ties).compile().as_text()
    watched = watched_types(traced.codes, program.signature)
    found = read_tick_loop(text, len(program.signature.ops), watched)
    assert found.copies == {}
    assert found.slices == {}
    assert found.updates == {}
