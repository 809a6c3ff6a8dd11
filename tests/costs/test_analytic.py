"""Operations, times and bytes of traced pieces against numbers worked out by hand."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from jaxpipe.costs.analytic import analytic_costs, count_operations
from jaxpipe.models import llama, nemotron_h
from jaxpipe.models.code import abstract_mesh, trace_model
from jaxpipe.models.piece import Model, Piece, param_shapes
from jaxpipe.planning.interchange import read_csv
from jaxpipe.planning.plan import Plan
from jaxpipe.program.instructions import expand, token_class
from jaxpipe.runtime.specs import piece_specs, register_types

B, S = 2, 16
T = B * S
LLAMA = llama.LlamaConfig(vocab=96, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=6, mlp_hidden=80)
H, M, ND, KD = 32, 80, 24, 12
"""Hidden size, MLP columns, channels of all queries and of all keys."""


def operations(function, *shapes, dtype=jnp.float32) -> dict:
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return dict(count_operations(jax.make_jaxpr(function)(*args).jaxpr.eqns))


@functools.cache
def model_and_codes(dtype=jnp.bfloat16, tp=1):
    model = llama.build(LLAMA, dtype, tp)
    return model, trace_model(model, abstract_mesh(1, 1, tp), B, S, ["none"] * len(model.pieces), dtype)


def costs(dtype=jnp.bfloat16, chip="h100") -> dict:
    table = analytic_costs(*model_and_codes(dtype), chip, jnp.dtype(dtype).itemsize)
    return {piece.name: piece for piece in table.pieces}


def matmuls(code) -> dict[str, int]:
    """Matmul FLOPs by phase."""
    counts = {name: count_operations(phase.fragment.eqns) for name, phase in code.phases.items()}
    return {name: count["float32"] + count["bfloat16"] for name, count in counts.items()}


def test_a_matmul_is_two_operations_a_product():
    assert operations(jnp.matmul, (3, 4), (4, 5)) == {"float32": 2 * 3 * 4 * 5}
    batched = lambda a, b: jnp.einsum("bnsd,btnd->bnst", a, b)  # noqa: E731
    assert operations(batched, (2, 3, 5, 7), (2, 4, 3, 7)) == {"float32": 2 * (2 * 3 * 5 * 4) * 7}
    two_contracted = lambda a, b: jnp.einsum("snd,ndh->sh", a, b)  # noqa: E731
    assert operations(two_contracted, (5, 2, 3), (2, 3, 7)) == {"float32": 2 * 5 * 7 * 6}


def test_matmuls_are_told_apart_by_their_operands():
    wide = lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32)  # noqa: E731
    assert operations(wide, (3, 4), (4, 5), dtype=jnp.bfloat16) == {"bfloat16": 120}
    mixed = lambda a, b: jax.lax.dot(a, b.astype(jnp.float32))  # noqa: E731
    assert operations(mixed, (3, 4), (4, 5), dtype=jnp.bfloat16) == {"float32": 120}


def test_elementwise_operations_and_what_is_free():
    assert operations(lambda x: jnp.exp(x) * x, (3, 4)) == {"vector": 24}
    assert operations(lambda x: x.sum(0), (3, 4)) == {"vector": 12}
    assert operations(lambda x: x.T.reshape(-1)[None].astype(jnp.bfloat16), (3, 4)) == {}


def test_a_gather_and_a_scatter_count_the_rows_they_touch():
    rows = jnp.array([1, 5])
    take = lambda x: x.at[rows].get(mode="fill", fill_value=0)  # noqa: E731
    indices = 20
    assert 2 * 4 <= operations(take, (1000, 4))["vector"] <= 2 * 4 + indices
    add = lambda x, u: x.at[rows].add(u, mode="drop")  # noqa: E731
    assert 2 * 4 <= operations(add, (1000, 4), (2, 4))["vector"] <= 2 * 4 + indices
    assert operations(lambda x: jax.lax.dynamic_slice(x, (0, 0), (2, 4)), (1000, 4)) == {"vector": 8}
    put = lambda x, u: jax.lax.dynamic_update_slice(x, u, (0, 0))  # noqa: E731
    assert operations(put, (1000, 4), (2, 4)) == {"vector": 8}


def test_a_scan_counts_its_length():
    def step(carry, w):
        return carry @ w, None

    assert operations(lambda x, w: jax.lax.scan(step, x, w)[0], (3, 4), (5, 4, 4)) == {"float32": 5 * 96}

    def outer(x, w):
        return jax.lax.scan(lambda c, _: (jax.lax.scan(step, c, w)[0], None), x, None, length=7)[0]

    assert operations(outer, (3, 4), (5, 4, 4)) == {"float32": 7 * 5 * 96}


def test_a_conditional_counts_its_dearest_branch():
    def function(x, w):
        branches = [lambda: x, lambda: x @ w, lambda: x @ w @ w]
        return jax.lax.switch(jnp.int32(1), branches)

    found = operations(function, (3, 4), (4, 4))
    assert found["float32"] == 2 * 96


def test_a_while_loop_counts_once():
    loop = lambda x, w: jax.lax.while_loop(lambda c: c[0, 0] < 9, lambda c: c @ w, x)  # noqa: E731
    assert operations(loop, (3, 4), (4, 4))["float32"] == 96


def test_calls_count_what_they_call():
    @jax.custom_vjp
    def rule(x, w):
        return x @ w

    rule.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, ct: (ct @ r[1].T, r[0].T @ ct))
    function = jax.jit(lambda x, w: jax.checkpoint(rule)(x, w))
    assert operations(function, (3, 4), (4, 4)) == {"float32": 96}


def test_collectives_count_whole_arrays_twice_where_they_sum():
    def body(x):
        gathered = jax.lax.all_gather(x, "model", axis=0, tiled=True)
        part = jax.lax.psum_scatter(gathered, "model", scatter_dimension=0, tiled=True)
        return jax.lax.psum(part.sum(0), "model")

    mesh = abstract_mesh(1, 1, 4)
    spec = jax.sharding.PartitionSpec
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec("model"), out_specs=spec())
    (eqn,) = jax.make_jaxpr(mapped)(jax.ShapeDtypeStruct((8, 5), jnp.float32)).jaxpr.eqns
    found = count_operations(eqn.params["jaxpr"].eqns)
    assert found["exchanged"] == 8 * 5 * 4 + 8 * 5 * 4 + 2 * 5 * 4


@pytest.mark.parametrize(("family", "matrices"), [("llama", 3), ("nemotron_h", 2)])
def test_an_mlp_takes_two_operations_a_parameter_and_token_in_each_phase(family, matrices):
    if family == "llama":
        model, codes = model_and_codes()
    else:
        sizes = {"mamba_heads": 1, "mamba_head_dim": 1, "mamba_groups": 1, "mamba_state": 1}
        config = nemotron_h.NemotronHConfig(96, H, "-", 4, 2, 6, M, **sizes)
        model = nemotron_h.build(config, jnp.bfloat16)
        codes = trace_model(model, abstract_mesh(1), B, S, ["none"] * 3, jnp.bfloat16)
    code = codes["mlp", "none"]
    assert sum(t.size for t in code.group("param").values() if t.ndim == 2) == matrices * H * M
    each = 2 * T * matrices * H * M
    assert matmuls(code) == {"F": each, "B": 2 * each, "I": each, "W": each}


def test_llama_takes_six_operations_a_parameter_and_token_and_twelve_a_score():
    """PaLM's rule (arXiv 2204.02311, appendix B): 6 N + 12 L heads D S a token, N without the embedding.

    Exact for the pieces with parameters. The attention core computes its scores again in the backward
    (FlashAttention, arXiv 2205.14135, section 3.1), one matmul of seven, so its share is 14/12.
    """
    model, codes = model_and_codes()
    total = {"core": 0, "rest": 0}
    for piece in model.pieces:
        counts = matmuls(codes[piece.kind, "none"])
        part = "core" if piece.kind == "attention_core" else "rest"
        total[part] += counts["B"] + (counts["F"] if piece.writes else 0)
    shapes = {name: own for name, own in param_shapes(model).items() if name != "embed"}
    matrices = sum(t.size for t in jax.tree.leaves(shapes) if t.ndim >= 2)
    assert total["rest"] == 6 * matrices * T
    assert total["core"] == 14 * LLAMA.layers * ND * S * T


def test_the_head_does_everything_in_its_input_gradient():
    head = costs()["head"]
    assert (head.F, head.W) == (0, 0)
    # Logits, their gradient times the table and times the hidden state.
    assert matmuls(model_and_codes()[1]["head", "none"])["I"] == 3 * 2 * T * H * LLAMA.vocab
    assert head.total > 3 * 2 * T * H * LLAMA.vocab / 989e12


def test_values_behind_each_piece_are_those_that_later_pieces_read():
    x, q, k = 2 * T * H, 2 * T * ND, 2 * T * KD
    found = {name: piece.output_bytes for name, piece in costs().items()}
    for layer in ("layer_00", "layer_01"):
        assert found[f"{layer}/pre"] == x + q + 2 * k
        assert found[f"{layer}/attention"] == x + q
        assert found[f"{layer}/post"] == x
    assert (found["embed"], found["layer_01/mlp"], found["head"]) == (x, x, 0)


def test_bytes_kept_for_the_backward():
    x, q, k, column = 2 * T * H, 2 * T * ND, 2 * T * KD, 4 * T
    found = {name: piece.stash_bytes for name, piece in costs().items()}
    # x, the mean square of the norm, and both inputs of the activation.
    assert found["layer_00/mlp"] == x + column + 2 * 2 * T * M
    assert found["layer_00/pre"] == x + column
    # q, k, v and for each of 4 heads the largest score and the sum of the softmax.
    assert found["layer_00/attention"] == q + 2 * k + 2 * 4 * column
    # o, which the core keeps too, counts here, since this piece has a W that keeps it longer.
    assert found["layer_00/post"] == q
    assert found["embed"] == 0
    assert found["head"] == x


def test_bytes_kept_for_the_weight_gradient():
    x, q, k, column = 2 * T * H, 2 * T * ND, 2 * T * KD, 4 * T
    found = {name: piece.grad_stash_bytes for name, piece in costs().items()}
    # All that I was given, and what it made: the cotangents of the second norm and of one activation.
    assert found["layer_00/mlp"] == (x + column + 2 * 2 * T * M) + x + 2 * T * M + x
    # x and its mean square, the cotangents of q, k, v, and the one that I made of the normed x.
    assert found["layer_00/pre"] == x + column + q + 2 * k + x
    # o and the cotangent of x.
    assert found["layer_00/post"] == q + x
    assert found["embed"] == x
    # Without a W nothing is left when I ends.
    assert (found["layer_00/attention"], found["head"]) == (0, 0)


def hybrid():
    sizes = {"mamba_heads": 4, "mamba_head_dim": 16, "mamba_groups": 2, "mamba_state": 8}
    config = nemotron_h.NemotronHConfig(96, H, "M-*-", 4, 2, 6, M, **sizes)
    return nemotron_h.build(config, jnp.bfloat16)


@pytest.mark.parametrize("make", [lambda: model_and_codes()[0], hybrid], ids=["llama", "nemotron_h"])
def test_bytes_held_are_those_of_the_registers_in_use(make):
    """One device and one micro-batch: the arrays made so far that the program still reads."""
    model = make()
    names, policies = tuple(piece.name for piece in model.pieces), ("none",) * len(model.pieces)
    codes = trace_model(model, abstract_mesh(1), B, S, policies, jnp.bfloat16)
    specs, types = piece_specs(model, codes, policies), register_types(codes)
    bytes_of = {name: sum(t.size * t.dtype.itemsize for t in own) for name, own in types.items()}
    schedule = read_csv("0F0,0I0,0W0")
    plan = Plan("p", 1, 1, names, (0, len(names)), (0,), policies, schedule)
    ((forward, gradient, weight),) = expand(plan, specs)
    made_f, made_i = ({t for x in action for t in x.outputs} for action in (forward, gradient))
    read_i, read_w = ({t for x in action for t in x.inputs} for action in (gradient, weight))
    after_f, after_i = made_f & (read_i | read_w), (made_f | made_i) & read_w
    pieces = analytic_costs(model, codes, "h100", 2).pieces
    assert sum(p.stash_bytes for p in pieces) == sum(bytes_of[token_class(specs, t)] for t in after_f)
    assert sum(p.grad_stash_bytes for p in pieces) == sum(bytes_of[token_class(specs, t)] for t in after_i)


def test_memory_of_parameters():
    shapes = param_shapes(model_and_codes()[0])
    for name, piece in costs().items():
        assert piece.param_bytes == 4 * sum(t.size for t in jax.tree.leaves(shapes[name]))
    factors = [analytic_costs(*model_and_codes(), "h100", size).state_factor for size in (4, 2)]
    # Master, gradient, two moments; and half as much again of one for a compute copy in two bytes.
    assert factors == [4, 4.5]


class Table(nn.Module):
    tp: int = 1

    @nn.compact
    def __call__(self, values, batch):
        table = self.param("table", nn.initializers.normal(), (1000, H))
        return {"x": table[batch["tokens"]]}, {}


class Dense(nn.Module):
    tp: int = 1

    @nn.compact
    def __call__(self, values, batch):
        return {"x": values["x"] @ self.param("w", nn.initializers.normal(), (H, H))}, {}


class Sum(nn.Module):
    tp: int = 1

    @nn.compact
    def __call__(self, values, batch):
        w = self.param("w", nn.initializers.normal(), (H, 1))
        return {}, {"nll": (values["x"] @ w).sum()}


TOY = Model(
    "toy",
    (
        Piece("table", "table", Table(), (), ("x",)),
        Piece("dense", "dense", Dense(), ("x",), ("x",)),
        Piece("first", "sum", Sum(), ("x",), (), ("nll",)),
        Piece("second", "sum", Sum(), ("x",), (), ("nll",)),
    ),
)


def test_times_by_hand():
    codes = trace_model(TOY, abstract_mesh(1), B, S, ["none"] * 4, jnp.float32)
    table = analytic_costs(TOY, codes, "h200")
    assert table.unit == "s"
    assert table.memory_limit_bytes == 151_397_597_184
    assert table.link.time(450e9) == pytest.approx(1 + 5e-6)
    lookup, dense, first, second = table.pieces
    matmul = 2 * T * H * H / (494e12 * 0.6)
    x, w = 4 * T * H, 4 * H * H
    second_a_byte = 1 / (4.8e12 * 0.8)
    # The weight gradient is added to a sum, which is read and written.
    moved = (x + w + x, x + w + x, x + x + 2 * w)
    for time, bytes_moved in zip((dense.F, dense.I, dense.W), moved, strict=True):
        assert time == pytest.approx(matmul + bytes_moved * second_a_byte)
    # Of the table, the forward reads a row a token; its gradient is as large as the table.
    assert 2 * x * second_a_byte < lookup.F < 3 * x * second_a_byte
    assert lookup.I == 0
    least = (x + 2 * 4 * 1000 * H) * second_a_byte
    assert least < lookup.W < 1.5 * least
    # A value that two pieces keep is in memory once.
    assert (first.stash_bytes, second.stash_bytes) == (x, 0)


def test_tensor_parallelism_adds_messages_and_halves_the_matmuls():
    code, half = (model_and_codes(tp=tp)[1]["mlp", "none"] for tp in (1, 2))
    assert matmuls(half) == {name: count // 2 for name, count in matmuls(code).items()}
    # The forward gathers x and scatters the sum; so does the input gradient, the other way around.
    for phase in "FI":
        exchanged = count_operations(half.phases[phase].fragment.eqns)["exchanged"]
        assert exchanged == 2 * (2 * T * H)
        assert count_operations(code.phases[phase].fragment.eqns)["exchanged"] == 0


def test_a_chip_matters():
    slow, fast = (costs(chip=chip)["layer_00/mlp"] for chip in ("h20", "h100"))
    assert slow.F > fast.F


def test_an_unknown_chip_is_named():
    with pytest.raises(ValueError, match="unknown chip 'h300'; expected one of h100, h200, h20, a100, cpu"):
        costs(chip="h300")
