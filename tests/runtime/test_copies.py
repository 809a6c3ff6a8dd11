"""What the compiler makes of the tick loop, read off the compiled program."""

import re
from collections import Counter

import numpy as np

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
from jaxpipe.runtime.specs import register_types


def copies_in_loops(text: str) -> Counter:
    """Shapes that compiled code copies outside its entry computation, which runs once."""
    found, entry = Counter(), False
    for line in text.splitlines():
        if not line.startswith(" "):
            entry = line.startswith("ENTRY")
        elif not entry and (match := re.match(r"\s+(?:ROOT )?%?[\w.-]+ = (\w+\[[\d,]*\])\S* copy\(", line)):
            found[match[1]] += 1
    return found


def test_no_register_file_is_copied_in_the_tick_loop():
    model = small_model("llama")
    names = tuple(p.name for p in model.pieces)
    plan = Plan(
        "1f1b", 2, 5, names, even(len(names), 2), (0, 1), ("none",) * len(names), SCHEDULES["1f1b"](2, 5)
    )
    traced = trace(model, make_mesh(2), ("none",), 2, 16)
    program = lowered(traced, plan)
    layout = make_layout(model, program)
    tables, length, ties = program_arguments(program, model, layout)
    slots = to_slots(model, layout, lively_params("llama"))
    step = compiled_step(traced, program)
    batch = random_batch(0, 5, 2, 16)
    text = step.lower(slots, batch, tables, length, {"nll": np.float32(1)}, ties).compile().as_text()
    types, spare = register_types(traced.codes), {c.register_class for c in program.signature.channels}
    files = {
        f"f32[{','.join(map(str, (count + (name in spare), *t.shape)))}]"
        for name, count in program.signature.registers
        for t in types[name]
    }
    assert len(files) >= 4
    assert files <= set(re.findall(r"\w+\[[\d,]*\]", text)), "the files are in the program under these shapes"
    copied = copies_in_loops(text)
    assert not files & set(copied), {shape: copied[shape] for shape in files & set(copied)}
