import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr

from jaxpipe.models.backward import trace_piece
from jaxpipe.models.piece import Piece

B, S, H, M = 2, 3, 4, 16
BATCH = {
    "tokens": jnp.arange(B * S).reshape(B, S) % 5,
    "weights": jnp.linspace(0.0, 1.0, B * S).reshape(B, S),
}
X = jax.random.normal(jax.random.key(0), (B, S, H))


def piece(function, reads=("x",), writes=("x",), losses=()) -> Piece:
    """A piece whose module is `function(module, values, batch)`."""

    class Module(nn.Module):
        tp: int = 1

        @nn.compact
        def __call__(self, values, batch):
            return function(self, values, batch)

    return Piece("p", "p", Module(), reads, writes, losses)


def dense(m, name, x, size):
    return x @ m.param(name, nn.initializers.normal(0.5), (x.shape[-1], size))


def mlp(m, v, b):
    h = nn.RMSNorm()(v["x"])
    return {"x": v["x"] + dense(m, "down", nn.gelu(dense(m, "up", h, M)), H)}, {}


def swiglu(m, v, b):
    h = nn.RMSNorm()(v["x"])
    return {"x": dense(m, "down", nn.silu(dense(m, "gate", h, M)) * dense(m, "up", h, M), H)}, {}


def core(m, v, b):
    scores = jax.nn.softmax(jnp.einsum("bsh,bth->bst", v["q"], v["k"]))
    return {"o": scores @ v["q"]}, {}


def two_reads(m, v, b):
    return {"x": v["x"] + dense(m, "w", v["o"], H)}, {}


def embed(m, v, b):
    table = m.param("table", nn.initializers.normal(1.0), (5, H))
    return {"x": table[b["tokens"]] @ m.param("w", nn.initializers.normal(1.0), (H, H))}, {}


def head(m, v, b):
    logits = jax.nn.log_softmax(dense(m, "w", v["x"], 5))
    return {}, {
        "nll": -(b["weights"] * jnp.take_along_axis(logits, b["tokens"][..., None], -1)[..., 0]).sum()
    }


def router(m, v, b):
    """An auxiliary loss and a z loss beside the written value."""
    logits = dense(m, "router", v["x"], 3)
    gates = jax.nn.softmax(logits)
    losses = {"aux": (gates.mean((0, 1)) ** 2).sum(), "z": (jax.nn.logsumexp(logits, -1) ** 2).sum()}
    return {"x": v["x"] + dense(m, "w", gates, H)}, losses


def passes(m, v, b):
    """Written values: a read, a constant, the same array twice."""
    h = jnp.exp(dense(m, "w", v["x"], H))
    return {"same": v["x"], "one": jnp.float32(1.0), "h": h, "again": h}, {}


def idle(m, v, b):
    """Two parameters without a gradient beside one with."""
    m.param("scalar", nn.initializers.ones, ())
    m.param("vector", nn.initializers.ones, (3,))
    return {"x": v["x"] * m.param("scale", nn.initializers.normal(1.0), (H,))}, {}


def bare(m, v, b):
    """No parameter, and nothing to remember."""
    return {"x": 2 * v["x"]}, {}


def loop(m, v, b):
    """A loop with its weights inside, and a matmul outside of it."""
    w = m.param("w", nn.initializers.normal(0.3), (2, H, H))
    y, _ = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), dense(m, "outside", v["x"], H), w)
    return {"x": y}, {}


def chunked(m, v, b):
    """A matmul in chunks of the sequence, which hold the weight."""
    w = m.param("w", nn.initializers.normal(0.3), (H, H))
    rows = jax.lax.map(lambda c: jnp.sin(c @ w), jnp.swapaxes(v["x"], 0, 1))
    return {"x": jnp.swapaxes(rows, 0, 1)}, {}


@jax.custom_vjp
def scaled(x, w):
    return jnp.tanh(x @ w)


scaled.defvjp(
    lambda x, w: ((y := jnp.tanh(x @ w)), (x, w, y)),
    lambda r, ct: (
        3 * (ct * (1 - r[2] ** 2)) @ r[1].T,
        jnp.einsum("bsh,bsm->hm", r[0], ct * (1 - r[2] ** 2)),
    ),
)


def custom(m, v, b):
    """A rule of its own, which `jax.vjp` follows too."""
    return {"x": scaled(v["x"], m.param("w", nn.initializers.normal(0.5), (H, H)))}, {}


def checkpointed(m, v, b):
    """`mlp` under `jax.checkpoint`, in a function of its own, with an activation that has its own rule."""
    up = m.param("up", nn.initializers.normal(0.5), (H, M))
    down = m.param("down", nn.initializers.normal(0.5), (M, H))
    body = jax.jit(jax.checkpoint(lambda x: x + jax.nn.relu(x @ up) @ down))
    return {"x": body(v["x"])}, {}


PIECES = {
    "mlp": piece(mlp),
    "swiglu": piece(swiglu),
    "core": piece(core, ("q", "k"), ("o",)),
    "two_reads": piece(two_reads, ("x", "o")),
    "embed": piece(embed, ()),
    "head": piece(head, writes=(), losses=("nll",)),
    "router": piece(router, losses=("aux", "z")),
    "passes": piece(passes, writes=("same", "one", "h", "again")),
    "idle": piece(idle),
    "bare": piece(bare),
    "loop": piece(loop),
    "chunked": piece(chunked),
    "custom": piece(custom),
    "checkpointed": piece(checkpointed),
}


@functools.cache
def inputs_of(p: Piece):
    keys = jax.random.split(jax.random.key(1), len(p.reads) + 1)
    reads = {n: jax.random.normal(k, (B, S, H)) for n, k in zip(p.reads, keys)}
    return jax.jit(p.module.init)(keys[-1], reads, BATCH).get("params", {}), reads


@functools.cache
def traced(name: str, policy: str):
    p = PIECES[name]
    return trace_piece(p, *inputs_of(p), BATCH, policy)


def tagged(group: str, arrays: dict) -> dict:
    return {(group, name): array for name, array in arrays.items()}


def arrays_of(params, reads) -> dict:
    """What a piece is given, by tag."""
    leaves = dict(enumerate(jax.tree.leaves(params)))
    return tagged("param", leaves) | tagged("read", reads) | tagged("batch", BATCH)


def run(code, arrays: dict, phases) -> dict:
    """Runs phases in order, each on what was given and made before."""
    grads = {}
    for phase in phases:
        c = code.phases[phase]
        results = dict(zip(c.results, c.fragment(*(arrays[t] for t in c.arguments)), strict=True))
        for tag in [t for t in results if t[0] == "grad"]:
            assert tag not in grads, f"{tag} is given twice"
            grads[tag] = results.pop(tag)
        arrays = arrays | results
    return arrays | grads


def matmuls(jaxpr) -> int:
    """Number of matmuls, those in a loop's body counted once."""
    count = 0
    for eqn in jaxpr.eqns:
        count += eqn.primitive.name == "dot_general"
        inner = [p for p in jax.tree.leaves(list(eqn.params.values())) if isinstance(p, ClosedJaxpr)]
        count += sum(matmuls(j.jaxpr) for j in inner)
    return count


def counts(name: str, policy: str) -> dict[str, int]:
    return {phase: matmuls(c.fragment) for phase, c in traced(name, policy).phases.items()}


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("name", PIECES)
def test_phases_together_equal_the_vector_jacobian_product(name, policy):
    p, code = PIECES[name], traced(name, policy)
    forward, weights = ["F"] * bool(p.writes), ["W"] * ("W" in code.phases)

    @jax.jit
    def reference_and_phases(params, reads):
        (written, losses), vjp = jax.vjp(lambda a, r: p.module.apply({"params": a}, r, BATCH), params, reads)
        cts = {
            n: jax.random.normal(jax.random.key(7 + i), w.shape) for i, (n, w) in enumerate(written.items())
        }
        scales = {n: jnp.float32(0.5 + i) for i, n in enumerate(losses)}
        d_params, d_reads = vjp((cts, scales))
        given = arrays_of(params, reads) | tagged("ct_write", cts) | tagged("ct_loss", scales)
        expected = tagged("write", written) | tagged("loss", losses) | tagged("ct_read", d_reads)
        expected |= tagged("grad", dict(enumerate(jax.tree.leaves(d_params))))
        orders = ([*forward, "B"], [*forward, "I", *weights])
        made = [run(code, given, phases) for phases in orders]
        return {str(tag): [value, *(arrays[tag] for arrays in made)] for tag, value in expected.items()}

    for tag, (value, *found) in reference_and_phases(*inputs_of(p)).items():
        for array in found:
            np.testing.assert_allclose(array, value, rtol=1e-5, atol=1e-6, err_msg=tag)


@pytest.mark.parametrize("name", PIECES)
def test_forward_alone(name):
    code = traced(name, "forward")
    assert set(code.phases) == {"F"}
    p = PIECES[name]
    params, reads = inputs_of(p)
    found = run(code, arrays_of(params, reads), "F")
    written, losses = p.module.apply({"params": params}, reads, BATCH)
    for tag, values in (("write", written), ("loss", losses)):
        for n, v in values.items():
            np.testing.assert_allclose(found[tag, n], v, rtol=1e-5, atol=1e-6)
    assert not [t for t in code.types if t[0] in ("residual", "stash")]


def test_an_mlp_splits_into_two_matmuls_a_phase():
    assert counts("mlp", "none") == {"F": 2, "B": 4, "I": 2, "W": 2}
    assert counts("swiglu", "none") == {"F": 3, "B": 6, "I": 3, "W": 3}


def test_full_recompute_repeats_a_matmul_once_and_only_those_that_are_needed():
    """The last matmul of the forward is not needed again; W repeats nothing."""
    assert counts("mlp", "full") == {"F": 2, "B": 5, "I": 3, "W": 2}
    assert counts("swiglu", "full") == {"F": 3, "B": 8, "I": 5, "W": 3}


def test_a_checkpoint_in_a_piece_is_undone():
    """It splits in I and W like any other piece, and the policy alone says what is computed again."""
    assert counts("checkpointed", "none") == {"F": 2, "B": 4, "I": 2, "W": 2}
    assert counts("checkpointed", "full") == {"F": 2, "B": 5, "I": 3, "W": 2}


def test_a_checkpoint_in_a_rule_is_inlined():
    @jax.custom_vjp
    def rule(x, w):
        return jnp.sin(x @ w)

    @jax.checkpoint
    def pulled(x, w, ct):
        inner = ct * jnp.cos(x @ w)
        return inner @ w.T, jnp.einsum("bsh,bsm->hm", x, inner)

    rule.defvjp(lambda x, w: (rule(x, w), (x, w)), lambda r, ct: pulled(*r, ct))
    p = piece(lambda m, v, b: ({"x": rule(v["x"], m.param("w", nn.initializers.normal(0.5), (H, H)))}, {}))
    code = trace_piece(p, *inputs_of(p), BATCH, "none")
    # The rule computes x w again, which its author wants: it is not the forward's.
    assert {name: matmuls(c.fragment) for name, c in code.phases.items()} == {"F": 1, "B": 3, "I": 2, "W": 1}


@pytest.mark.parametrize(
    ("name", "policy", "expected"),
    [
        # x, the mean square of the norm and the activation's input; gate and up for SwiGLU.
        ("mlp", "none", {"read": [(B, S, H)], "residual": [(B, S), (B, S, M)]}),
        ("swiglu", "none", {"read": [(B, S, H)], "residual": [(B, S), (B, S, M), (B, S, M)]}),
        ("mlp", "full", {"read": [(B, S, H)], "residual": []}),
        ("two_reads", "none", {"read": [(B, S, H)], "residual": []}),
        ("bare", "none", {"read": [], "residual": []}),
        # No residual where everything follows from weights and batch.
        ("embed", "none", {"read": [], "residual": []}),
        # tanh(x w) is written and kept where it is.
        ("custom", "none", {"read": [(B, S, H)], "residual": [], "write": [(B, S, H)]}),
    ],
)
def test_what_the_backward_keeps_of_the_forward(name, policy, expected):
    code = traced(name, policy)
    for group, shapes in expected.items():
        found = [code.types[t].shape for t in code.phases["B"].arguments if t[0] == group]
        assert sorted(found) == sorted(shapes), group


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("name", PIECES)
def test_weights_are_never_stashed(name, policy):
    """Told by their shapes, which no value has."""
    code = traced(name, policy)
    weights = {t.shape for t in code.group("param").values() if t.ndim >= 2}
    for group in ("residual", "stash"):
        assert not weights & {t.shape for t in code.group(group).values()}


def test_a_cast_weight_is_cast_again_not_stashed():
    def half(m, v, b):
        w = m.param("w", nn.initializers.normal(0.5), (H, M)).astype(jnp.bfloat16)
        return {"o": (v["x"].astype(jnp.bfloat16) @ w).astype(jnp.float32)}, {}

    p = piece(half, writes=("o",))
    code = trace_piece(p, *inputs_of(p), BATCH, "none")
    # Of x, its bfloat16 copy is kept: half the bytes.
    kept = [(t.shape, t.dtype) for t in code.group("residual").values()]
    assert kept == [((B, S, H), jnp.bfloat16)]
    assert ("param", 0) in code.phases["I"].arguments
    assert ("param", 0) not in code.phases["W"].arguments


def test_reads_are_kept_in_their_registers():
    code = traced("core", "none")
    assert set(code.phases["B"].names("read")) == {"q", "k"}
    read_like = [t for t in code.group("residual").values() if t.shape == (B, S, H)]
    assert read_like == []


def test_a_sink_has_everything_in_its_backward():
    code = traced("head", "none")
    assert code.phases["I"] is code.phases["B"]
    assert set(code.phases) == {"F", "B", "I"}
    assert {("loss", "nll"), ("ct_read", "x"), ("grad", 0)} == set(code.phases["B"].results)
    assert code.group("residual") == {}


def test_losses_beside_values_are_given_by_the_forward():
    code = traced("router", "none")
    assert {("loss", "aux"), ("loss", "z")} <= set(code.phases["F"].results)
    assert not [t for phase in "BIW" for t in code.phases[phase].results if t[0] == "loss"]
    assert set(code.phases["B"].names("ct_loss")) == {"aux", "z"}


def test_pieces_without_parameters_have_no_weight_phase():
    for name in ("core", "bare"):
        assert set(traced(name, "none").phases) == {"F", "B", "I"}


def test_a_parameter_without_gradient_gets_zeros():
    code = traced("idle", "none")
    arguments = {t: jnp.ones(code.types[t].shape) for t in code.phases["B"].arguments}
    c = code.phases["B"]
    found = dict(zip(c.results, c.fragment(*(arguments[t] for t in c.arguments))))
    shapes = {i: t.shape for i, t in code.group("param").items()}
    unused = [i for i, shape in shapes.items() if shape != (H,)]
    assert len(unused) == 2
    for i in unused:
        np.testing.assert_array_equal(jnp.asarray(found["grad", i]), jnp.zeros(()))
        assert jnp.shape(found["grad", i]) == shapes[i]


def test_weight_gradients_of_a_loop_come_with_its_input_gradient():
    """A loop is one equation: stashing its weight gradient for W would only cost memory."""
    code = traced("loop", "none")
    names = [p for p in code.phases["I"].results if p[0] == "grad"]
    assert [code.types[t].shape for t in names] == [(2, H, H)]
    assert [code.types[t].shape for t in code.phases["W"].results] == [(H, H)]
    code = traced("chunked", "none")
    assert "W" not in code.phases
    assert ("grad", 0) in code.phases["I"].results
    assert code.group("stash") == {}


def test_an_unknown_policy_is_named():
    p = PIECES["bare"]
    with pytest.raises(ValueError, match="recompute policy 'some' is unknown; expected one of"):
        trace_piece(p, {}, {"x": X}, BATCH, "some")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda m, v, b: ({"y": v["x"]}, {}), r"gave values \['y'\] and losses \[\]; declared are \['x'\]"),
        (lambda m, v, b: ({"x": v["x"]}, {"z": 0.0}), r"losses \['z'\]; declared are \['x'\] and \[\]"),
        (
            lambda m, v, b: ({"x": jnp.argmax(v["x"], -1)}, {}),
            r"writes 'x' as int32\[2,3\]; values must be floating point",
        ),
        (
            lambda m, v, b: ({"x": v["x"].astype(jnp.bfloat16)}, {}),
            r"reads 'x' as float32\[2,3,4\] but writes it as bfloat16\[2,3,4\]; a value keeps its type",
        ),
        (lambda m, v, b: ({"x": v["x"][:1]}, {}), r"writes it as float32\[1,3,4\]"),
    ],
)
def test_a_module_that_breaks_its_declaration_is_named(function, message):
    with pytest.raises(ValueError, match=f"piece 'p' .*{message}"):
        trace_piece(piece(function), {}, {"x": X}, BATCH, "none")


@pytest.mark.parametrize(("loss", "found"), [(X, r"float32\[2,3,4\]"), (jnp.bfloat16(1), r"bfloat16\[\]")])
def test_a_loss_is_a_float32_scalar(loss, found):
    p = piece(lambda m, v, b: ({}, {"nll": loss}), writes=(), losses=("nll",))
    with pytest.raises(ValueError, match=f"loss 'nll' is {found}; expected float32"):
        trace_piece(p, {}, {"x": X}, BATCH, "none")
