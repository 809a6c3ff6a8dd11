import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxpipe.models.piece import (
    Model,
    Piece,
    apply_model,
    example_batch,
    init_params,
    param_shapes,
    param_specs,
    piece_params,
    producers,
)

V, H = 7, 4
NORMAL = nn.initializers.normal(0.3)


class Embed(nn.Module):
    tp: int = 1

    @nn.compact
    def __call__(self, values, batch):
        init = nn.with_partitioning(NORMAL, ("model", None))
        return {"x": self.param("table", init, (V // self.tp, H))[batch["tokens"]]}, {}


class Pre(nn.Module):
    tp: int = 1

    @nn.compact
    def __call__(self, values, batch):
        return {"q": values["x"] @ self.param("w", NORMAL, (H, H))}, {}


class Square(nn.Module):
    """No parameters."""

    tp: int = 1

    @nn.compact
    def __call__(self, values, batch):
        return {"o": values["q"] ** 2}, {}


class Post(nn.Module):
    tp: int = 1

    @nn.compact
    def __call__(self, values, batch):
        x = values["x"] + values["o"] @ self.param("w", NORMAL, (H, H))
        return {"x": x}, {"aux": jnp.mean(x).astype(jnp.float32)}


class Head(nn.Module):
    tp: int = 1

    @nn.compact
    def __call__(self, values, batch):
        logits = values["x"] @ self.param("table", NORMAL, (V, H)).T
        return {}, {"nll": (jax.nn.logsumexp(logits, -1) * batch["weights"]).sum()}


EMBED = Piece("embed", "embed", Embed(), (), ("x",))
HEAD = Piece("head", "head", Head(), ("x",), (), ("nll",), (("table", ("embed", "table")),))


def layer(name: str) -> list[Piece]:
    return [
        Piece(f"{name}/pre", "pre", Pre(), ("x",), ("q",)),
        Piece(f"{name}/core", "core", Square(), ("q",), ("o",)),
        Piece(f"{name}/post", "post", Post(), ("x", "o"), ("x",), ("aux",)),
    ]


MODEL = Model("toy", (EMBED, *layer("a"), *layer("b"), HEAD))


def test_a_read_means_the_latest_writer():
    assert producers(MODEL.pieces) == [
        {},
        {"x": 0},
        {"q": 1},
        {"x": 0, "o": 2},
        {"x": 3},
        {"q": 4},
        {"x": 3, "o": 5},
        {"x": 6},
    ]


def test_params_have_one_entry_a_piece_and_tied_ones_stand_at_their_owner():
    params = init_params(MODEL, 0)
    assert list(params) == list(param_shapes(MODEL)) == [p.name for p in MODEL.pieces]
    assert params["head"] == params["a/core"] == {}
    assert piece_params(HEAD, params)["table"] is params["embed"]["table"]
    shapes = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), params)
    assert shapes == param_shapes(MODEL)


def test_params_depend_on_seed_and_position_only():
    params, again, other = init_params(MODEL, 3), init_params(MODEL, 3), init_params(MODEL, 4)
    jax.tree.map(np.testing.assert_array_equal, params, again)
    assert not np.array_equal(params["embed"]["table"], other["embed"]["table"])
    assert not np.array_equal(params["a/pre"]["w"], params["b/pre"]["w"])
    longer = init_params(Model("longer", (EMBED, *layer("a"), *layer("b"), *layer("c"), HEAD)), 3)
    for name in ("embed", "a/pre", "a/post", "b/pre", "b/post"):
        jax.tree.map(np.testing.assert_array_equal, params[name], longer[name])


def test_specs_follow_the_partitioning_of_parameters():
    specs = param_specs(MODEL)
    assert specs["embed"] == {"table": PartitionSpec("model", None)}
    assert specs["a/pre"] == {"w": PartitionSpec()}
    is_spec = lambda s: isinstance(s, PartitionSpec)  # noqa: E731
    assert jax.tree.structure(specs, is_leaf=is_spec) == jax.tree.structure(param_shapes(MODEL))


def test_the_sequential_model_by_hand():
    params = init_params(MODEL, 1)
    batch = example_batch(2, 3) | {"tokens": jnp.array([[0, 1, 2], [3, 4, 6]]), "weights": jnp.ones((2, 3))}
    table = params["embed"]["table"]
    x, aux = table[batch["tokens"]], 0.0
    for name in "ab":
        x = x + ((x @ params[f"{name}/pre"]["w"]) ** 2) @ params[f"{name}/post"]["w"]
        aux += x.mean()
    losses = apply_model(MODEL, params, batch)
    assert set(losses) == {"aux", "nll"}
    np.testing.assert_allclose(losses["aux"], aux, rtol=1e-5)
    np.testing.assert_allclose(losses["nll"], jnp.log(jnp.exp(x @ table.T).sum(-1)).sum(), rtol=1e-5)


def tied_head(owner: str, parameter: str, name: str = "head", own: str = "table") -> Piece:
    return Piece(name, "head", Head(), ("x",), (), ("nll",), ((own, (owner, parameter)),))


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ((EMBED, EMBED, HEAD), "two pieces are named 'embed'"),
        (
            (EMBED, Piece("p", "head", Pre(), ("x",), ("q",)), HEAD),
            "kind 'head' names two different modules",
        ),
        ((HEAD,), "piece 'head' reads 'x', which none before it writes"),
        (
            (EMBED, Piece("again", "embed", Embed(), (), ("x",)), HEAD),
            "piece 'again' overwrites 'x', which none has read",
        ),
        ((EMBED, *layer("a")), r"values \['x'\] are written last and never read"),
        (
            (EMBED, tied_head("em", "table")),
            "piece 'head' ties 'table' to 'table' of piece 'em', which does not exist; pieces: embed, head",
        ),
        ((EMBED, tied_head("head", "norm")), "of piece 'head'; the owner must be another piece"),
        (
            (EMBED, HEAD, tied_head("head", "table", "second")),
            "of piece 'head', which ties it too; tie it to 'table' of 'embed'",
        ),
    ],
)
def test_a_model_that_is_wired_wrong_is_named(pieces, message):
    with pytest.raises(ValueError, match=message):
        Model("toy", pieces)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"writes": ()}, "has neither writes nor losses; expected at least one"),
        ({"reads": ("q", "x", "q")}, r"reads lists \['q'\] more than once"),
        ({"writes": ("x", "x")}, r"writes lists \['x'\] more than once"),
        ({"losses": ("nll", "nll")}, r"losses lists \['nll'\] more than once"),
        ({"tied": (("w", ("a", "w")), ("w", ("b", "w")))}, r"tied lists \['w'\] more than once"),
    ],
)
def test_a_piece_that_makes_no_sense_is_named(fields, message):
    with pytest.raises(ValueError, match=f"piece 'p'.* {message}"):
        Piece(**({"name": "p", "kind": "k", "module": Pre(), "reads": ("x",), "writes": ("q",)} | fields))


@pytest.mark.parametrize("read", [param_shapes, param_specs, lambda model: init_params(model, 0)])
@pytest.mark.parametrize(
    ("head", "message"),
    [
        (tied_head("embed", "tabel"), "but 'embed' has no parameter 'tabel'; it has: table"),
        (tied_head("embed", "table", own="bias"), "but 'head' has no parameter 'bias'; it has: table"),
        (tied_head("a/pre", "w"), r"but its shape is \(7, 4\) and the owner's \(4, 4\)"),
    ],
)
def test_a_tied_parameter_that_is_not_there_is_named(read, head, message):
    with pytest.raises(ValueError, match=f"piece 'head' ties .* {message}"):
        read(Model("toy", (EMBED, *layer("a"), head)))
