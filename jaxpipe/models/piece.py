"""Pieces: the smallest parts of a model that are placed on devices.

A model is a tuple of pieces. Pieces talk through named values: each reads some names, writes some
names, and a read means the latest writer before it. `x` is the residual stream; a transformer
layer reads and writes

    attention_pre   x       -> q, k, v
    attention_core  q, k, v -> o
    attention_post  x, o    -> x
    mlp             x       -> x

so `x` passes by the attention core untouched and the core may run on another device.

Shape letters: B sequences in a micro-batch, S tokens in a sequence, H hidden size.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta
from jax.sharding import PartitionSpec

Values = dict[str, jax.Array]
Batch = Mapping[str, jax.Array]
"""One micro-batch: `tokens`, `targets`, `segments`, `positions` int32[B, S]; `weights` float32[B, S].

`segments` numbers the packed documents of a sequence, `positions` restarts with each of them, and
`weights` is 0 where a target does not count.
"""


@dataclass(frozen=True)
class Piece:
    """One placeable part of a model.

    `module` is a Flax Linen module called as `module(values, batch) -> (written, losses)`, where
    `values` holds exactly the names in `reads`, `written` exactly those in `writes`, and `losses`
    one float32 scalar for each name in `losses`, summed (not averaged) over the micro-batch.
    Modules have an attribute `tp`: the number of devices on mesh axis `model`. With `tp` > 1 they
    take and give local shapes (the residual stream split along S) and call the collectives of
    that axis themselves.

    Pieces of one `kind` have equal modules and so share compiled code.
    `tied` maps a top-level parameter of this piece to the (piece name, parameter) that owns it.
    """

    name: str
    kind: str
    module: nn.Module
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    losses: tuple[str, ...] = ()
    tied: tuple[tuple[str, tuple[str, str]], ...] = ()


@dataclass(frozen=True)
class Model:
    """A model as an ordered tuple of pieces."""

    name: str
    pieces: tuple[Piece, ...]

    def __post_init__(self):
        modules, names, latest = {}, set(), {}
        for piece in self.pieces:
            if piece.name in names:
                raise ValueError(f"two pieces are named {piece.name!r}")
            names.add(piece.name)
            code = (piece.module, piece.reads, piece.writes, piece.losses)
            if modules.setdefault(piece.kind, code) != code:
                raise ValueError(f"kind {piece.kind!r} names two different modules")
            for name in piece.reads:
                if name not in latest:
                    raise ValueError(f"piece {piece.name!r} reads {name!r}, which none before it writes")
                latest[name] = True
            for name in piece.writes:
                if latest.get(name) is False:
                    raise ValueError(f"piece {piece.name!r} overwrites {name!r}, which none has read")
                latest[name] = False
        unread = [name for name, read in latest.items() if not read]
        if unread:
            raise ValueError(f"values {unread} are written last and never read")


def producers(pieces: tuple[Piece, ...]) -> list[dict[str, int]]:
    """For each piece: name read -> index of the piece that wrote it."""
    latest, result = {}, []
    for i, piece in enumerate(pieces):
        result.append({name: latest[name] for name in piece.reads})
        latest.update(dict.fromkeys(piece.writes, i))
    return result


def kept_reads(pieces: tuple[Piece, ...]) -> list[tuple[str, ...]]:
    """For each piece: the values it reads that a later piece reads too.

    Their cotangents are summed as a chain from the last reader to the first.
    """
    wiring = producers(pieces)
    last = {(producer, name): i for i, w in enumerate(wiring) for name, producer in w.items()}
    return [tuple(n for n in p.reads if last[w[n], n] > i) for i, (p, w) in enumerate(zip(pieces, wiring))]


def example_batch(sequences: int, length: int) -> Values:
    """A batch of zeros of the given shape, for tracing and initialising."""
    integer = jnp.zeros((sequences, length), jnp.int32)
    return {
        "tokens": integer,
        "targets": integer,
        "segments": integer,
        "positions": integer,
        "weights": jnp.zeros((sequences, length), jnp.float32),
    }


# It runs once, and optimising the random bits of one Mamba-2 block for a CPU takes many seconds.
_QUICKLY = {"xla_backend_optimization_level": 0}


@functools.cache
def _initialisers(model: Model) -> dict[str, Callable]:
    """By kind, a function from a key to the boxed parameters of one piece (global shapes)."""
    types, found = {}, {}
    for piece in model.pieces:
        if piece.kind not in found:
            module = piece.module.clone(tp=1)
            reads = {name: types[name] for name in piece.reads}

            def init(key, module=module, reads=reads):
                zeros = {name: jnp.zeros(t.shape, t.dtype) for name, t in reads.items()}
                return module.init_with_output(key, zeros, example_batch(1, 16))

            (written, _), _ = jax.eval_shape(init, jax.random.key(0))
            found[piece.kind] = written, lambda key, init=init: init(key)[1].get("params", {})
        types |= found[piece.kind][0]
    return {kind: own for kind, (_, own) in found.items()}


@functools.cache
def _compiled_initialisers(model: Model) -> dict[str, Callable]:
    return {k: jax.jit(f, compiler_options=_QUICKLY) for k, f in _initialisers(model).items()}


def _init_boxed(model: Model, seed: int, initialisers: dict[str, Callable]) -> dict:
    root, params = jax.random.key(seed), {}
    for i, piece in enumerate(model.pieces):
        own = dict(initialisers[piece.kind](jax.random.fold_in(root, i)))
        tied = {name for name, _ in piece.tied}
        params[piece.name] = {name: value for name, value in own.items() if name not in tied}
    return params


def init_params(model: Model, seed: int) -> dict:
    """Master parameters (float32, global shapes) by piece name, the same under any plan.

    Piece number i draws from `fold_in(key(seed), i)`. A tied parameter stands at its owner only.
    Compiles as it goes: call it outside `jit`.
    """
    return meta.unbox(_init_boxed(model, seed, _compiled_initialisers(model)))


@functools.cache
def param_shapes(model: Model) -> dict:
    """Types of `init_params`, without computing anything."""
    return jax.eval_shape(lambda: meta.unbox(_init_boxed(model, 0, _initialisers(model))))


@functools.cache
def param_specs(model: Model) -> dict:
    """PartitionSpec of every parameter (only axis `model` appears), shaped like `init_params`."""
    specs = nn.get_partition_spec(jax.eval_shape(lambda: _init_boxed(model, 0, _initialisers(model))))
    return jax.tree.map(lambda s: s or PartitionSpec(), specs, is_leaf=lambda s: s is None or _is_spec(s))


def _is_spec(value) -> bool:
    return isinstance(value, PartitionSpec)


def piece_params(piece: Piece, params: Mapping) -> dict:
    """The parameters that `piece` uses, tied ones fetched from their owners."""
    own = dict(params[piece.name])
    for name, (owner, owner_name) in piece.tied:
        own[name] = params[owner][owner_name]
    return own


def apply_model(model: Model, params: Mapping, batch: Batch) -> Values:
    """The sequential model: losses by name, summed over pieces. This is the reference for every plan."""
    values, losses = {}, {}
    for piece in model.pieces:
        inputs = {name: values[name] for name in piece.reads}
        written, lost = piece.module.apply({"params": piece_params(piece, params)}, inputs, batch)
        values |= written
        losses |= {name: losses.get(name, 0.0) + value for name, value in lost.items()}
    return losses
