"""Updates through the pipeline against plain Optax on the sequential model."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from experiments.benchmarks.pipelines import norm_error, padded, sequential, worst_error
from jaxpipe.models.families import FAMILIES
from jaxpipe.models.piece import init_params
from jaxpipe.runtime.layout import from_slots
from jaxpipe.training import optimizer as optimizers
from jaxpipe.training.prepare import prepare
from jaxpipe.training.state import from_layers, initial_state, make_evaluate, make_update, to_layers
from tests.training.runs import tiny_config

CLIP = 0.5


@functools.cache
def job_of(family: str, stage: int, data: int = 1, model: int = 1):
    """Tied embeddings; an eps far above the gradients makes Adam's update smooth in them."""
    return prepare(
        tiny_config(
            "nowhere",
            family,
            model={"tied": True},
            mesh={"stage": stage, "data": data, "model": model},
            optimizer={"eps": 1e-2, "clip_norm": CLIP, "learning_rate": 0.03},
        )
    )


@functools.cache
def batches(count: int = 3) -> list[dict]:
    """Batches [4, 2, 16] whose targets all count in one micro-batch, in part in two, not at all in one."""
    result = []
    for seed in range(count):
        rng, shape = np.random.default_rng(seed), (4, 2, 16)
        share = np.array([1.0, 0.5, 0.2, 0.0])[:, None, None]
        result.append(
            {
                "tokens": rng.integers(0, 256, shape, np.int32),
                "targets": rng.integers(0, 256, shape, np.int32),
                "segments": np.zeros(shape, np.int32),
                "positions": np.broadcast_to(np.arange(16, dtype=np.int32), shape),
                "weights": (rng.random(shape) < share).astype(np.float32),
            }
        )
    return result


@functools.cache
def sequential_of(family: str):
    return sequential(FAMILIES[family][1](job_of(family, 4).config.model))


@functools.cache
def sequential_updates(family: str):
    """Parameters, moments and norms of the gradients after three updates without a pipeline."""
    config = job_of(family, 4).config
    params = start = init_params(FAMILIES[family][1](config.model), config.seed)
    optimizer = optimizers.make_optimizer(config, optimizers.decay_mask(params))
    state, gradients, losses, norms = optimizer.init(params), sequential_of(family), [], []
    for batch in batches():
        loss, grads = gradients(params, batch)
        losses.append(float(loss))
        norms.append(float(optax.global_norm(grads)))
        clipped = jax.tree.map(lambda g: np.float32(g * min(1.0, CLIP / norms[-1])), grads)
        updates, state = optimizer.update(clipped, state, params)
        params = optax.apply_updates(params, updates)
    mu, nu = optimizers.get_moments(state)
    return jax.device_get((start, params, mu, nu)), losses, norms


@pytest.fixture(scope="module", params=[("llama", 4), ("nemotron_h", 2, 2, 2)], ids=str)
def updated(request):
    """A job, its state after three updates, and the metrics of each."""
    job = job_of(*request.param)
    update, state, metrics = make_update(job), initial_state(job), []
    for batch in batches():
        state, values = update(state, batch)
        metrics.append({name: float(value) for name, value in values.items()})
    return job, state, metrics


def trees_of(state) -> tuple:
    """Parameters and moments in slots, as NumPy arrays."""
    return jax.device_get((state.params, *optimizers.get_moments(state.optimizer)))


def test_three_updates_equal_those_without_a_pipeline(updated):
    job, state, metrics = updated
    (start, *wanted), losses, norms = sequential_updates(job.config.family)
    params, *moments = (from_slots(job.model, job.layout, tree) for tree in trees_of(state))
    assert worst_error(params, wanted[0]) <= 1e-5
    assert [norm_error(*pair) <= 1e-5 for pair in zip(moments, wanted[1:])] == [True, True]
    # What the updates changed, in itself: the parameters are not just still where they were.
    moved, wanted_moved = (jax.tree.map(np.subtract, p, start) for p in (params, wanted[0]))
    assert norm_error(moved, wanted_moved) <= 1e-4
    assert [m["loss"] for m in metrics] == pytest.approx(losses, rel=1e-5)
    assert [m["learning_rate"] for m in metrics] == pytest.approx([0.015, 0.03, 0.03])
    assert min(norms) > CLIP  # so the norm counts, and has to count a tied table once
    assert [m["grad_norm"] for m in metrics] == pytest.approx(norms, rel=1e-5)
    assert int(state.step) == 3


def test_slots_without_a_piece_stay_zero(updated):
    job, state, _ = updated
    empty = [(key, d) for key, held in job.layout.placement for d, piece in enumerate(held) if piece < 0]
    assert empty
    for tree in trees_of(state):
        for key, device in empty:
            assert not any(leaf[device].any() for leaf in jax.tree.leaves(tree[key]))


def test_copies_of_a_tied_table_stay_equal(updated):
    job, state, _ = updated
    for tree in trees_of(state):
        embedding, head = (
            tree[key]["table"][device]
            for key, held in job.layout.placement
            for device, piece in enumerate(held)
            if piece in (0, len(job.model.pieces) - 1)
        )
        np.testing.assert_array_equal(embedding, head)


def test_evaluation_gives_the_loss_of_the_sequential_model(updated):
    job, state, _ = updated
    batch = padded({name: value[:1] for name, value in batches()[1].items()}, 4, 0.0)
    nll, tokens = make_evaluate(job)(state.params, batch)
    params = from_slots(job.model, job.layout, jax.device_get(state.params))
    loss, _ = sequential_of(job.config.family)(params, batch)
    assert tokens == batch["weights"].sum() > 0
    assert float(nll / tokens) == pytest.approx(loss, rel=1e-5)


def test_checkpoint_form_and_back(updated):
    job, state, _ = updated
    layers = jax.device_get(to_layers(job)(state))
    back = from_layers(job)(layers)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(back), jax.device_get(state))
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, back, state))
    assert layers["params"]["embed"]["table"].shape == (256, 16)
    assert "table" not in layers["params"]["head"]


def test_initial_state_is_the_same_under_every_plan():
    job = job_of("llama", 4)
    three = prepare(dataclasses.replace(job.config, mesh=dataclasses.replace(job.config.mesh, stage=3)))
    one, other = (jax.device_get(to_layers(j)(initial_state(j))) for j in (job, three))
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert not any(leaf.any() for leaf in jax.tree.leaves((one["mu"], one["nu"])))
