"""The split of the backward into I and W, of every piece of every family."""

import jax.numpy as jnp
import pytest

from jaxpipe.costs.analytic import count_operations
from jaxpipe.models.code import abstract_mesh, trace_model
from tests.models.test_families import model_of

FAMILIES = ("llama", "nemotron_h")


def codes_of(family):
    model = model_of(family)
    codes = trace_model(model, abstract_mesh(1), 1, 16, ("none",) * len(model.pieces), jnp.float32)
    return {kind: code.phases for (kind, _), code in codes.items()}


def matmuls(phase):
    return count_operations(phase.fragment.eqns)["float32"]


@pytest.mark.parametrize("family", FAMILIES)
def test_apart_they_do_the_matmuls_that_they_do_together(family):
    for kind, phases in codes_of(family).items():
        if kind != "head":
            apart = matmuls(phases["I"]) + (matmuls(phases["W"]) if "W" in phases else 0)
            assert apart == matmuls(phases["B"]), kind


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_head_makes_weight_gradients_in_its_input_gradient(family):
    early = {kind for kind, p in codes_of(family).items() if any(tag == "grad" for tag, _ in p["I"].results)}
    assert early == {"head"}


@pytest.mark.parametrize("kind", ["mlp", "attention_pre", "attention_post"])
def test_dense_blocks_split_in_halves(kind):
    """One matmul for each weight in F, in I and in W."""
    phases = codes_of("llama")[kind]
    assert matmuls(phases["W"]) == matmuls(phases["I"]) == matmuls(phases["F"]) > 0
