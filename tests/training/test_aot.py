from dataclasses import replace

import pytest

from jaxpipe.program.program import Op
from jaxpipe.reports.aot import OpRow
from jaxpipe.runtime.tick_loop import OpCode, TickLoop
from jaxpipe.training import aot
from jaxpipe.training.aot import (
    Compiled,
    abstract_batch,
    compile_ahead,
    op_name,
    summary,
    to_json,
)
from jaxpipe.training.prepare import prepare
from tests.training.runs import tiny_config


def test_batch_has_the_types_that_training_gives():
    job = prepare(tiny_config("nowhere", mesh={"stage": 2, "data": 2}))
    batch = abstract_batch(job)
    assert {n: (t.shape, t.dtype.name) for n, t in batch.items()} == {
        "tokens": ((4, 2, 16), "int32"),
        "targets": ((4, 2, 16), "int32"),
        "segments": ((4, 2, 16), "int32"),
        "positions": ((4, 2, 16), "int32"),
        "weights": ((4, 2, 16), "float32"),
    }
    assert {t.sharding.shard_shape(t.shape) for t in batch.values()} == {(4, 1, 16)}


def test_op_names():
    assert op_name(Op("mlp", "none", 3, "W")) == "mlp W"
    assert op_name(Op("mamba", "full", None, "B")) == "mamba full B"


def test_does_not_compile_what_cannot_fit(monkeypatch):
    """An H100 with 1 MB of memory: it is known that the step does not fit before anything is compiled."""
    small = replace(aot.check_fits.__globals__["CHIPS"]["h100"], memory_bytes=2**20)
    monkeypatch.setitem(aot.check_fits.__globals__["CHIPS"], "h100", small)
    monkeypatch.setattr(aot, "op_workspace", lambda *_: pytest.fail("an op was compiled"))
    job = prepare(tiny_config("nowhere", mesh={"stage": 2}, model={"vocab": 4096}))
    with pytest.raises(
        ValueError, match=r"without the workspace of its ops, .* of chip 'h100'; its largest part"
    ):
        compile_ahead(job, "h100", lambda _: None)


RESULT = Compiled(
    1.5,
    20.25,
    30.5,
    {"registers": 300, "workspace": 100},
    404,
    2,
    (),
    TickLoop({"bf16[2,3]": 2}, {}, {"f32[2,3]": 1}, 3, 1, (OpCode(5, 1, {"gemm": 1}),)),
    (OpRow("mlp F", 5, 1, {"gemm": 1}, 100),),
)


def test_report_as_json():
    report = to_json(RESULT)
    assert report["predicted_bytes"] == {"registers": 300, "workspace": 100, "all": 400}
    assert report["peak_bytes"] == 404
    assert report["patterns"] == 2
    assert report["copies"] == {"bf16[2,3]": 2}
    assert report["permutes"] == {"asynchronous": 3, "synchronous": 1}
    assert report["ops"][0]["workspace_bytes"] == 100


def test_summary():
    assert summary(RESULT) == [
        "lowered in 1.5 s, compiled in 20.2 s (30.5 s of CPU time)",
        "ops: 1, patterns of permutes: 2, parameter slots: static",
        "kernels of libraries: 1 (1 of gemm)",
        "permutes beside the dispatch: 3 of 4",
        "copies of register files, weights or gradients in the tick loop: 2 (2 of bf16[2,3])",
        "slices of whole weights or gradients there: 0 read, 1 (1 of f32[2,3]) written",
    ]


def test_summary_names_kinds_with_stacked_slots():
    stacked = RESULT._replace(stacked=("mamba2", "mlp"))
    assert summary(stacked)[1] == "ops: 1, patterns of permutes: 2, parameter slots: stacked for mamba2, mlp"
    assert to_json(stacked)["stacked_kinds"] == ["mamba2", "mlp"]
