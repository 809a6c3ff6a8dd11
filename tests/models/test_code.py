"""Which parameters are cast for the matmuls and which stay as they are."""

import jax.numpy as jnp
import pytest
from jax.extend.core import Var

from jaxpipe.models.code import abstract_mesh, compute_copy, trace_model
from jaxpipe.models.families import FAMILIES
from jaxpipe.models.jaxprs import trace
from jaxpipe.models.piece import param_shapes, piece_params

SIZES = {
    "llama": {
        "vocab": 32,
        "hidden": 8,
        "layers": 1,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 6,
        "mlp_hidden": 12,
    },
    "nemotron_h": {
        "vocab": 32,
        "hidden": 8,
        "pattern": "M-*",
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 6,
        "mlp_hidden": 12,
        "mamba_heads": 6,
        "mamba_head_dim": 3,
        "mamba_groups": 2,
        "mamba_state": 5,
        "chunk": 4,
    },
}
VECTORS = {
    "llama": {"attention_pre": {"norm"}, "mlp": {"norm"}, "head": {"norm"}},
    "nemotron_h": {
        "mamba": {
            "norm",
            "conv_x_bias",
            "conv_b_bias",
            "conv_c_bias",
            "dt_bias",
            "a_log",
            "skip",
            "gate_norm",
        },
        "attention_pre": {"norm"},
        "mlp": {"norm"},
        "head": {"norm"},
    },
}
"""By family and kind: parameters with one number a channel or head."""


def model_of(family, tp=1, dtype=jnp.bfloat16):
    config, build = FAMILIES[family]
    return build(config(**SIZES[family]), dtype, tp)


def test_compute_copy_casts_by_the_number_of_axes():
    params = {
        "scalar": jnp.ones(()),
        "vector": jnp.ones(3),
        "matrix": jnp.ones((2, 3)),
        "cube": jnp.ones((1, 2, 3)),
    }
    found = {name: v.dtype for name, v in compute_copy(params, jnp.bfloat16).items()}
    low, high = jnp.bfloat16, jnp.float32
    assert found == {"scalar": high, "vector": high, "matrix": low, "cube": low}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_scales_channels_or_heads_is_a_vector(family):
    model = model_of(family)
    shapes = param_shapes(model)
    for piece in model.pieces:
        vectors = {name for name, t in shapes[piece.name].items() if t.ndim < 2}
        assert vectors == VECTORS[family].get(piece.kind, set()), piece.name


def test_vectors_of_a_mamba_block():
    shapes = {n: t.shape for n, t in param_shapes(model_of("nemotron_h"))["layer_00/mamba"].items()}
    assert {shapes[n] for n in ("dt_bias", "a_log", "skip")} == {(6,)}
    assert shapes["gate_norm"] == shapes["conv_x_bias"] == (18,)
    assert shapes["conv_b_bias"] == shapes["conv_c_bias"] == (10,)


def narrowed(fragment, sources) -> set:
    """Those of `sources` that an equation casts to bfloat16, alone or after a mere change of shape."""
    origin, found = {v: v for v in sources}, set()
    for eqn in fragment.eqns:
        first = eqn.invars[0] if eqn.invars else None
        if isinstance(first, Var) and first in origin:
            if eqn.primitive.name in (
                "reshape",
                "broadcast_in_dim",
                "expand_dims",
                "squeeze",
                "pcast",
                "exp",
            ):
                origin[eqn.outvars[0]] = origin[first]
            if eqn.primitive.name == "convert_element_type" and eqn.outvars[0].aval.dtype == jnp.bfloat16:
                found.add(origin[first])
    return found


@pytest.mark.parametrize(("family", "tp"), [("llama", 1), ("nemotron_h", 2)])
def test_pieces_in_bfloat16_read_vectors_in_float32(family, tp):
    model = model_of(family, tp)
    policies = ["none"] * len(model.pieces)
    codes = trace_model(model, abstract_mesh(1, 1, tp), 1, 8, policies, jnp.bfloat16)
    for piece in model.pieces:
        names = sorted(piece_params(piece, param_shapes(model)))
        vectors = VECTORS[family].get(piece.kind, set())
        code = codes[piece.kind, "none"]
        for i, t in code.group("param").items():
            expected = jnp.float32 if names[i] in vectors else jnp.bfloat16
            assert t.dtype == expected, (piece.name, names[i])
        for phase in code.phases.values():
            given = dict(zip(phase.arguments, phase.fragment.inputs))
            scales = [v for (tag, i), v in given.items() if tag == "param" and v.aval.ndim < 2]
            assert not narrowed(phase.fragment, scales), piece.name


def test_narrowed_finds_a_cast():
    fragment = trace(lambda a, b: [a.reshape(2, 3).astype(jnp.bfloat16), b + 1], jnp.ones(6), jnp.ones(2))
    assert narrowed(fragment, fragment.inputs) == {fragment.inputs[0]}
