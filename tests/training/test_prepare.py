import dataclasses

import jax
import pytest
from jax.sharding import AxisType

from experiments.configs import nemotron_h_8b
from jaxpipe.training.aot import abstract_batch
from jaxpipe.training.config import from_config_dict
from jaxpipe.training.prepare import prepare, price
from jaxpipe.training.state import abstract_state
from tests.training.runs import tiny_config


def test_training_and_evaluation_share_slots():
    job = prepare(tiny_config("nowhere", mesh={"stage": 3}, plan={"recompute": "mlp=full"}))
    assert job.program.slots == job.evaluation.slots
    assert {op.phase for op in job.program.signature.ops} == {"F", "B"}
    assert {op.phase for op in job.evaluation.signature.ops} == {"F"}
    assert {(op.kind, op.policy) for op in job.program.signature.ops if op.policy == "full"} == {
        ("mlp", "full")
    }
    assert job.plan.devices == job.mesh.shape["stage"] == 3
    assert job.plan.microbatches == 4


def test_a_model_of_8b_parameters_makes_no_arrays():
    """Its state would take 97 GB."""
    mesh = jax.make_mesh((8, 1, 1), ("stage", "data", "model"), (AxisType.Auto,) * 3)
    before = sum(array.nbytes for array in jax.live_arrays())
    config = nemotron_h_8b.get_config()
    config.batch.update(global_batch=2, microbatches=2)
    job = prepare(from_config_dict(config), mesh)
    state, batch = abstract_state(job), abstract_batch(job)
    assert job.mesh is mesh
    assert sum(array.nbytes for array in jax.live_arrays()) - before < 1e6
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) > 3 * 8.1e9
    assert {leaf.shape for leaf in batch.values()} == {(2, 1, 4096)}


def test_costs_do_not_depend_on_the_plan():
    job = prepare(tiny_config("nowhere"))
    other = dataclasses.replace(job.config, plan=dataclasses.replace(job.config.plan, schedule="gpipe"))
    assert price(other, job.model, job.mesh.abstract_mesh) == job.costs
    assert [piece.name for piece in job.costs.pieces] == [piece.name for piece in job.model.pieces]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mesh": {"stage": 9}},
            r"field 'mesh' asks for 9 devices \(stage 9 x data 1 x model 1\), but JAX sees 8",
        ),
        ({"mesh": {"stage": 1, "model": 4}}, "kv_heads is 2, which tp=4 does not divide"),
        (
            {"mesh": {"stage": 7}, "model": {"layers": 1}},
            "field 'mesh.stage' is 7; the model has 6 pieces, so expected at most 6",
        ),
        ({"plan": {"chip": "abacus"}}, "'abacus'"),
        ({"plan": {"recompute": "mamba=full"}}, "but the model has no kind 'mamba'; its kinds: embed, "),
    ],
)
def test_what_does_not_fit_together(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        prepare(tiny_config("nowhere", **changes))
    assert "\n" not in str(error.value)
