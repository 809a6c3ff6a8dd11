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

    Raises ValueError for a name listed twice, and for a piece that gives nothing.
    """

    name: str
    kind: str
    module: nn.Module
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    losses: tuple[str, ...] = ()
    tied: tuple[tuple[str, tuple[str, str]], ...] = ()

    def __post_init__(self):
        names = {"reads": self.reads, "writes": self.writes, "losses": self.losses}
        for field, listed in (names | {"tied": [name for name, _ in self.tied]}).items():
            if repeated := sorted({name for name in listed if listed.count(name) > 1}):
                raise ValueError(f"piece {self.name!r}: {field} lists {repeated} more than once")
        if not self.writes and not self.losses:
            raise ValueError(f"piece {self.name!r} has neither writes nor losses; expected at least one")


@dataclass(frozen=True)
class Model:
    """A model as an ordered tuple of pieces.

    Raises ValueError naming the piece that does not fit the others.
    """

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
        self._check_owners()

    def _check_owners(self) -> None:
        """Tied parameters belong to other pieces, which hold them themselves."""
        tied = {piece.name: dict(piece.tied) for piece in self.pieces}
        for piece in self.pieces:
            for name, (owner, owner_name) in piece.tied:
                where = f"piece {piece.name!r} ties {name!r} to {owner_name!r} of piece {owner!r}"
                if owner == piece.name:
                    raise ValueError(f"{where}; the owner must be another piece")
                if owner not in tied:
                    raise ValueError(f"{where}, which does not exist; pieces: {', '.join(tied)}")
                if owner_name in tied[owner]:
                    real, real_name = tied[owner][owner_name]
                    raise ValueError(f"{where}, which ties it too; tie it to {real_name!r} of {real!r}")


def producers(pieces: tuple[Piece, ...]) -> list[dict[str, int]]:
    """For each piece: name read -> index of the piece that wrote it."""
    latest, result = {}, []
    for i, piece in enumerate(pieces):
        result.append({name: latest[name] for name in piece.reads})
        latest.update(dict.fromkeys(piece.writes, i))
    return result


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


@functools.cache
def _boxed_types(model: Model) -> dict:
    """Types of all parameters with the axes that split them, by piece; checks those that are tied."""
    initialisers = _initialisers(model)
    by_kind = {kind: jax.eval_shape(f, jax.random.key(0)) for kind, f in initialisers.items()}
    every = {piece.name: by_kind[piece.kind] for piece in model.pieces}
    for piece in model.pieces:
        for name, (owner, owner_name) in piece.tied:
            _check_tied(piece.name, name, every[piece.name], owner, owner_name, every[owner])
    return {piece.name: _without_tied(piece, every[piece.name]) for piece in model.pieces}


def _without_tied(piece: Piece, params: Mapping) -> dict:
    tied = dict(piece.tied)
    return {name: value for name, value in params.items() if name not in tied}


def _check_tied(user: str, name: str, params: Mapping, owner: str, owner_name: str, owned: Mapping) -> None:
    """A tied parameter stands on both sides, in one shape."""
    where = f"piece {user!r} ties {name!r} to {owner_name!r} of piece {owner!r}"
    for piece, parameter, known in ((user, name, params), (owner, owner_name, owned)):
        if parameter not in known:
            found = ", ".join(sorted(known)) or "none"
            raise ValueError(f"{where}, but {piece!r} has no parameter {parameter!r}; it has: {found}")
    shape, owner_shape = (jax.tree.map(jnp.shape, meta.unbox(v)) for v in (params[name], owned[owner_name]))
    if shape != owner_shape:
        raise ValueError(f"{where}, but its shape is {shape} and the owner's {owner_shape}")


def init_params(model: Model, seed: int) -> dict:
    """Master parameters (float32, global shapes) by piece name, the same under any plan.

    In piece order. Piece number i draws from `fold_in(key(seed), i)`; a tied parameter stands at its owner.
    Compiles as it goes: call it outside `jit`.

    Raises:
      ValueError: for a tied parameter that does not exist or differs from its owner's.
    """
    _boxed_types(model)
    initialisers, root, params = _compiled_initialisers(model), jax.random.key(seed), {}
    for i, piece in enumerate(model.pieces):
        every = initialisers[piece.kind](jax.random.fold_in(root, i))
        params[piece.name] = meta.unbox(_without_tied(piece, every))
    return params


@functools.cache
def param_shapes(model: Model) -> dict:
    """Types of `init_params`, without computing anything; raises what it does."""
    return {name: meta.unbox(own) for name, own in _boxed_types(model).items()}


@functools.cache
def param_specs(model: Model) -> dict:
    """PartitionSpec of every parameter (only axis `model` appears), shaped like `init_params`."""
    specs = {name: nn.get_partition_spec(own) for name, own in _boxed_types(model).items()}
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
