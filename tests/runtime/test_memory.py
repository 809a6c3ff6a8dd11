"""Predicted memory against sizes worked out by hand, and against what XLA says on CPUs."""

import jax
import jax.numpy as jnp
import pytest

from jaxpipe.costs.chips import CHIPS
from jaxpipe.runtime.compiler import compiler_options
from jaxpipe.runtime.memory import check_fits, distinct_ops, op_workspace, predicted_bytes
from jaxpipe.training.aot import abstract_batch
from jaxpipe.training.prepare import prepare
from jaxpipe.training.state import abstract_state
from tests.training.runs import tiny_config

GIB = 2**30
EMBED, HEAD = 256 * 16, 256 * 16 + 16
PRE, POST, MLP = 16 + 16 * 8 * (4 + 2 + 2), 4 * 8 * 16, 16 + 3 * 16 * 32


def parts_of(job) -> dict[str, int]:
    state = abstract_state(job)
    return predicted_bytes(
        job.codes,
        job.program.signature,
        state.params,
        state.optimizer,
        abstract_batch(job),
        jnp.dtype(job.config.dtype),
    )


def test_parameters_are_padded_to_the_largest_set_of_slots():
    """Even parts of 10 pieces: embed, pre, core, post, mlp and pre, core, post, mlp, head."""
    job = prepare(tiny_config("nowhere", mesh={"stage": 2}, plan={"partition": "even"}, dtype="bfloat16"))
    assert job.plan.stage_bounds == (0, 5, 10)
    parts = parts_of(job)
    held = EMBED + PRE + POST + MLP + HEAD
    vectors = 3 * 16  # the scales of the norms of pre, mlp and head are not cast
    assert parts["master parameters"] == parts["gradients"] == 4 * held
    counters = 2 * 4
    assert parts["optimizer state"] == 2 * 4 * held + counters
    assert parts["compute copies"] == 2 * (held - vectors)
    assert parts["batch and tables"] == 5 * 4 * 8 * 16


def test_float32_has_no_compute_copies_unless_slots_are_stacked():
    job = prepare(tiny_config("nowhere", mesh={"stage": 2}, plan={"partition": "even"}))
    assert parts_of(job)["compute copies"] == 0
    job = prepare(tiny_config("nowhere", mesh={"stage": 1}, plan={"slots": "stacked"}))
    assert parts_of(job)["compute copies"] == 4 * (EMBED + 2 * (PRE + POST + MLP) + HEAD)


def test_registers_with_the_spare_ones_and_messages():
    job = prepare(tiny_config("nowhere", mesh={"stage": 2}, plan={"partition": "even"}))
    signature, parts = job.program.signature, parts_of(job)
    counts = dict(signature.registers)
    x = "float32[2,16,16]"  # two sequences of 16 tokens
    assert {c.register_class for c in signature.channels} == {x}
    assert parts["messages on their way"] == 2 * len(signature.channels) * 4 * 2 * 16 * 16
    heads = {"float32[2,16,4,8]": 2 * 16 * 4 * 8, "float32[2,16,2,8]": 2 * 16 * 2 * 8}
    expected = (counts[x] + 1) * 2 * 16 * 16 + sum(counts[name] * size for name, size in heads.items())
    bundles = {
        "attention_core/none/residuals": 2 * 2 * 4 * 16,  # the softmax's largest scores and its sums
        "attention_pre/none/residuals": 2 * 16,  # the norm's scale of each token
    }
    for name, size in bundles.items():
        expected += counts[name] * size
    rest = set(counts) - {x, *heads, *bundles}
    assert rest == {"mlp/none/residuals"}
    per_mlp = (parts["registers"] - 4 * expected) / 4 / counts["mlp/none/residuals"]
    assert per_mlp in (2 * 16 * (1 + n * 32) for n in (2, 3)), "a scale and two or three arrays of its width"


def test_axis_model_splits_what_a_device_holds():
    whole, split = (
        parts_of(prepare(tiny_config("nowhere", mesh={"stage": 2, "model": n}, plan={"partition": "even"})))
        for n in (1, 2)
    )
    norms = 3 * 16 * 4
    assert 2 * (split["master parameters"] - norms) == whole["master parameters"] - norms


def test_workspace_of_the_head_is_its_logits():
    """[32 tokens, 256] float32, which nothing but the head's own matmuls see, three of them at the least."""
    job = prepare(tiny_config("nowhere", mesh={"stage": 1}, model={"layers": 1}))
    specs = {(s.kind, s.policy): s for s in job.pieces}
    options = compiler_options(job.mesh) | {"xla_backend_optimization_level": 0}
    found = {
        op.kind: op_workspace(job.mesh, job.codes, specs[op.kind, op.policy], op, options)
        for op in distinct_ops(job.program.signature)
        if (op.kind, op.phase) in (("head", "B"), ("attention_post", "F"))
    }
    logits = 32 * 256 * 4
    assert logits <= found["head"] < 8 * logits
    assert found["attention_post"] < logits


def test_identical_kinds_count_once():
    job = prepare(tiny_config("nowhere", mesh={"stage": 1}))
    ops = distinct_ops(job.program.signature)
    assert len(job.program.signature.ops) > len(ops)
    assert len({(op.kind, op.phase, op.kept) for op in ops}) == len(ops)


def test_fits():
    check_fits({"registers": CHIPS["h200"].memory_bytes}, "h200")
    check_fits({"registers": 2**60}, "cpu")


def test_does_not_fit():
    parts = {"registers": 100 * GIB, "gradients": 60 * GIB}
    message = (
        "the step needs 160.0 GiB a device, without the workspace of its ops, 19.0 GiB more than "
        "the 141.0 GiB of chip 'h200'; its largest part: registers, 100.0 GiB"
    )
    with pytest.raises(ValueError) as error:
        check_fits(parts, "h200")
    assert str(error.value) == message
    with pytest.raises(ValueError, match=r"170\.0 GiB a device, with the workspace of its ops"):
        check_fits(parts | {"workspace": 10 * GIB}, "h200")


def test_prediction_makes_no_arrays():
    before = {id(a) for a in jax.live_arrays()}
    job = prepare(tiny_config("nowhere", mesh={"stage": 2}))
    parts_of(job)
    assert not [a for a in jax.live_arrays() if id(a) not in before]
