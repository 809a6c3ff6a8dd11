import jax
import jax.numpy as jnp
import pytest

from experiments.benchmarks.pipelines import small_model
from jaxpipe.models.code import abstract_mesh, trace_model
from jaxpipe.program.spec import operands, register_class
from jaxpipe.runtime.specs import piece_specs, register_types, value_class

POLICIES = ("none", "full", "forward")


def specs_of(policy: str):
    model = small_model("llama")
    policies = (policy,) * len(model.pieces)
    codes = trace_model(model, abstract_mesh(1), 2, 16, policies, jnp.float32)
    return model, codes, piece_specs(model, codes, policies)


def test_values_of_one_type_share_a_class():
    assert value_class(jax.ShapeDtypeStruct((2, 16, 4), jnp.bfloat16)) == "bfloat16[2,16,4]"
    _, _, specs = specs_of("none")
    assert {s.classes["x"] for s in specs if "x" in s.classes} == {"float32[2,16,16]"}


@pytest.mark.parametrize("policy", POLICIES)
def test_names_wiring_and_parameters_are_the_models(policy):
    model, _, specs = specs_of(policy)
    assert [(s.name, s.kind, s.writes) for s in specs] == [(p.name, p.kind, p.writes) for p in model.pieces]
    assert specs[0].reads == {}
    assert specs[3].reads == {"x": 0, "o": 2}  # attention_post reads the stream past the attention core
    assert {s.kind for s in specs if not s.has_params} == {"attention_core"}


def test_phases_of_each_policy():
    _, _, none = specs_of("none")
    _, _, full = specs_of("full")
    _, _, forward = specs_of("forward")
    by_kind = {s.kind: set(s.phases) for s in none}
    assert by_kind["mlp"] == set("FBIW")
    assert by_kind["attention_core"] == set("FBI")
    assert by_kind["embed"] == set("FBW")  # tokens have no gradient
    assert by_kind["head"] == set("BI")  # its loss is made in its backward
    assert {s.kind: set(s.phases) for s in full} == by_kind
    assert all(set(s.phases) == {"F"} for s in forward)


def test_only_pieces_that_do_not_recompute_leave_residuals():
    _, _, none = specs_of("none")
    _, _, full = specs_of("full")
    leaves = {s.kind: s.phases["F"].residuals for s in none if "F" in s.phases}
    assert leaves["mlp"]
    assert not any(s.phases["F"].residuals for s in full if "F" in s.phases)
    assert all(s.phases["B"].reads == ("x",) for s in full if s.kind == "mlp")


@pytest.mark.parametrize("policy", POLICIES)
def test_every_operand_has_a_register_type(policy):
    _, codes, specs = specs_of(policy)
    types = register_types(codes)
    for spec in specs:
        for phase in spec.phases:
            inputs, outputs = operands(spec, phase, tuple(spec.reads) if phase in "BI" else ())
            for operand in inputs + outputs:
                register = types[register_class(spec, operand)]
                assert all(isinstance(t, jax.ShapeDtypeStruct) for t in register)
                if operand[0] not in ("residuals", "stash"):
                    assert [value_class(t) for t in register] == [spec.classes[operand[1]]]


def test_weights_are_not_in_registers():
    """A residual or stash of a weight's shape would be a copy of it for each micro-batch."""
    _, codes, _ = specs_of("none")
    shapes = {
        t.shape for (tag, _), t in (x for c in codes.values() for x in c.types.items()) if tag == "param"
    }
    matrices = {shape for shape in shapes if len(shape) > 1}
    held = [t.shape for register in register_types(codes).values() for t in register]
    assert matrices.isdisjoint(held)
