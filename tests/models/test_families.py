"""Whole models: packing, tensor parallelism, initialisation and wrong configurations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpipe.models.code import compute_copy
from jaxpipe.models.families import FAMILIES
from jaxpipe.models.piece import apply_model, init_params, param_specs

SIZES = {
    "llama": {
        "vocab": 34,
        "hidden": 16,
        "layers": 1,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 6,
        "mlp_hidden": 24,
        "logit_chunk": 10,
        "window": 7,
        "attention_soft_cap": 5.0,
        "logit_soft_cap": 4.0,
    },
    "nemotron_h": {
        "vocab": 34,
        "hidden": 16,
        "pattern": "M-*",
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 4,
        "mlp_hidden": 24,
        "mamba_heads": 4,
        "mamba_head_dim": 4,
        "mamba_groups": 2,
        "mamba_state": 6,
        "chunk": 4,
        "logit_chunk": 1000,
    },
}
DOCUMENTS, LENGTH = 3, 6
"""Packed into one sequence of 18 tokens, these fit neither the window nor the chunks."""


def model_of(family, tp=1, dtype=jnp.float32, **fields):
    config, build = FAMILIES[family]
    return build(config(**(SIZES[family] | fields)), dtype, tp)


@functools.cache
def initial_params(family, tied=False):
    return init_params(model_of(family, tied=tied), 3)


@functools.cache
def livened_params(family, tied=False):
    """Parameters moved off their initial ones and zeros, so that each of them matters."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: np.asarray(x + 0.1 * rng.normal(size=x.shape), np.float32), initial_params(family, tied)
    )


@functools.cache
def loss_and_gradients(family, tied=False):
    model = model_of(family, tied=tied)
    return jax.jit(jax.value_and_grad(lambda params, batch: apply_model(model, params, batch)["nll"]))


def documents():
    """DOCUMENTS rows of LENGTH tokens, each a document of its own."""
    rng = np.random.default_rng(0)
    shape = (DOCUMENTS, LENGTH)
    return {
        "tokens": rng.integers(0, 34, shape).astype(np.int32),
        "targets": rng.integers(0, 34, shape).astype(np.int32),
        "segments": np.repeat(np.arange(DOCUMENTS, dtype=np.int32), LENGTH).reshape(shape),
        "positions": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), shape),
        "weights": rng.uniform(0, 1, shape).astype(np.float32),
    }


def packed():
    """The same documents in one row."""
    return {name: x.reshape(1, -1) for name, x in documents().items()}


def close(got, want):
    """Equal to 2e-5 of each array's largest element."""
    for (path, x), y in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want)):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5 * np.abs(y).max(), err_msg=str(path))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_are_separate_documents(family):
    run, params = loss_and_gradients(family), livened_params(family)
    got = run(params, packed())
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(got[1]))
    close(got, run(params, documents()))


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("nemotron_h", False)])
def test_two_devices_give_the_loss_and_gradients_of_one(family, tied):
    params, batch = livened_params(family, tied), packed()
    model = model_of(family, tp=2, tied=tied)
    specs = param_specs(model)
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))

    def vary(x):
        return x if "model" in jax.typeof(x).mat.varying else jax.lax.pcast(x, "model", to="varying")

    def local(params, batch):
        loss, grads = jax.value_and_grad(lambda p: apply_model(model, p, batch)["nll"])(
            jax.tree.map(vary, params)
        )
        summed = jax.tree.map(lambda g, s: g if "model" in s else jax.lax.psum(g, "model"), grads, specs)
        return jax.lax.psum(loss, "model"), summed

    two = jax.shard_map(local, mesh=mesh, in_specs=(specs, P()), out_specs=(P(), specs), check_vma=True)
    close(jax.jit(two)(params, batch), loss_and_gradients(family, tied)(params, batch))


def test_tied_table_gets_both_gradients():
    tied = livened_params("llama", True)
    assert "table" not in tied["head"]
    untied = tied | {"head": tied["head"] | {"table": tied["embed"]["table"]}}
    loss, grads = loss_and_gradients("llama", True)(tied, packed())
    want_loss, want = loss_and_gradients("llama")(untied, packed())
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    close(grads["embed"]["table"], want["embed"]["table"] + want["head"]["table"])


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_parameters_depend_on_seed_and_place_only(family):
    other = init_params(model_of(family, tp=2, dtype=jnp.bfloat16), 3)
    jax.tree.map(np.testing.assert_array_equal, initial_params(family), other)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(other))


def test_seeds_and_places_differ():
    models = {
        layers: model_of("llama", layers=layers, mlp_hidden=2, heads=2, head_dim=2) for layers in (2, 3)
    }
    two, three, again = init_params(models[2], 0), init_params(models[3], 0), init_params(models[2], 1)
    place = [params["layer_00/mlp"]["up"] for params in (two, three, again)] + [two["layer_01/mlp"]["up"]]
    np.testing.assert_array_equal(place[0], place[1])
    assert not np.array_equal(place[0], place[2])
    assert not np.array_equal(place[0], place[3])


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_loss_is_near_uniform(family):
    loss, _ = loss_and_gradients(family)(initial_params(family), packed())
    np.testing.assert_allclose(loss / packed()["weights"].sum(), np.log(34), rtol=0.03)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_near_float32(family):
    """One rounding is 2^-9 of a number; a dozen in a row stay within 5% of each gradient's norm."""
    params, model = livened_params(family), model_of(family, dtype=jnp.bfloat16)
    want_loss, want = loss_and_gradients(family)(params, packed())

    @jax.jit
    @jax.value_and_grad
    def low(params):
        return apply_model(model, compute_copy(params, jnp.bfloat16), packed())["nll"]

    loss, grads = low(params)
    np.testing.assert_allclose(loss, want_loss, rtol=2e-3)
    for (path, got), x in zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(want)):
        assert got.dtype == jnp.float32
        assert np.linalg.norm(got - x) < 0.05 * np.linalg.norm(x), path


def test_pieces_of_llama():
    names = [(p.name, p.kind) for p in model_of("llama", layers=1).pieces]
    assert names == [
        ("embed", "embed"),
        ("layer_00/pre", "attention_pre"),
        ("layer_00/attention", "attention_core"),
        ("layer_00/post", "attention_post"),
        ("layer_00/mlp", "mlp"),
        ("head", "head"),
    ]


def test_pieces_of_nemotron_h():
    names = [p.name for p in model_of("nemotron_h").pieces]
    assert names == [
        "embed",
        "layer_00/mamba",
        "layer_01/mlp",
        "layer_02/pre",
        "layer_02/attention",
        "layer_02/post",
        "head",
    ]


@pytest.mark.parametrize(
    ("family", "fields", "tp", "words"),
    [
        ("llama", {"hidden": 0}, 1, "LlamaConfig: hidden is 0; expected an integer of at least 1"),
        ("llama", {"vocab": 3.5}, 1, "vocab is 3.5"),
        ("llama", {"norm_eps": 0.0}, 1, "norm_eps is 0.0; expected a number above 0"),
        ("llama", {"layers": -1}, 1, "layers is -1"),
        ("llama", {"heads": 3}, 1, "heads is 3; expected a multiple of kv_heads=2"),
        ("llama", {"head_dim": 5}, 1, "head_dim is 5; rotary embedding needs an even one"),
        ("llama", {"window": 0}, 1, "window is 0"),
        ("llama", {"vocab": 32}, 4, "kv_heads is 2, which tp=4 does not divide"),
        ("llama", {"vocab": 35}, 2, "vocab is 35, which tp=2 does not divide"),
        ("llama", {}, 0, "tp is 0"),
        (
            "nemotron_h",
            {"pattern": "M-X*"},
            1,
            r"pattern 'M-X\*' has 'X' at position 2; allowed are M \(Mamba-2\), ",
        ),
        ("nemotron_h", {"pattern": ""}, 1, "pattern is empty"),
        ("nemotron_h", {"mamba_heads": 3}, 1, "mamba_heads is 3; expected a multiple of mamba_groups=2"),
        ("nemotron_h", {"mamba_groups": 1}, 2, "mamba_groups is 1, which tp=2 does not divide"),
        ("nemotron_h", {"mlp_hidden": 25}, 2, "mlp_hidden is 25, which tp=2 does not divide"),
        ("nemotron_h", {"chunk": True}, 1, "chunk is True"),
    ],
)
def test_wrong_configurations(family, fields, tp, words):
    with pytest.raises(ValueError, match=words):
        model_of(family, tp, **fields)


def test_configurations_are_frozen():
    config = FAMILIES["llama"][0](**SIZES["llama"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden = 4
