"""Where parameters live: one array for each (kind, slot), with a leading axis over devices.

Slot j of kind k on device d holds the parameters of piece slots[k][d][j], or zeros where a device
has fewer pieces of that kind. A tied parameter has a copy in the slot of every user.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpipe.models.piece import Model, Piece, param_specs, piece_params
from jaxpipe.program.program import Program

SlotTree = dict[str, dict]
"""Slot key -> tree of arrays [P, *parameter shape]."""


@dataclass(frozen=True)
class Layout:
    """placement: (slot key, piece index or -1 for each device), in order of kinds and slots."""

    placement: tuple[tuple[str, tuple[int, ...]], ...]


def slot_key(kind: str, slot: int) -> str:
    """Name of a parameter slot."""
    return f"{kind}:{slot}"


def _kind(key: str) -> str:
    return key.rsplit(":", 1)[0]


def make_layout(model: Model, program: Program) -> Layout:
    """The layout that a program expects: as many slots of each kind as its signature says."""
    placement = []
    for kind, count in program.signature.slots:
        for slot in range(count):
            held = tuple(d[slot] if slot < len(d) else -1 for d in program.slots[kind])
            placement.append((slot_key(kind, slot), held))
    return Layout(tuple(placement))


def _examples(model: Model, layout: Layout) -> dict[str, Piece]:
    """Slot key -> any piece of the slot's kind."""
    by_kind = {p.kind: p for p in model.pieces}
    return {key: by_kind[_kind(key)] for key, _ in layout.placement}


def slot_specs(model: Model, layout: Layout) -> SlotTree:
    """PartitionSpec of every slot array: axis `stage`, then those of the parameter."""
    specs = param_specs(model)
    return {
        key: jax.tree.map(lambda s: PartitionSpec("stage", *s), piece_params(piece, specs), is_leaf=_is_spec)
        for key, piece in _examples(model, layout).items()
    }


def _is_spec(value) -> bool:
    return isinstance(value, PartitionSpec)


def shardings(mesh: Mesh, specs) -> dict:
    """NamedShardings for a tree of PartitionSpecs."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=_is_spec)


def to_slots(model: Model, layout: Layout, params: Mapping) -> SlotTree:
    """Parameters (or anything shaped like them) by piece -> slot arrays. Call it under `jit`."""
    result = {}
    for (key, held), piece in zip(layout.placement, _examples(model, layout).values()):
        shapes = jax.tree.map(jnp.zeros_like, piece_params(piece, params))
        rows = [piece_params(model.pieces[i], params) if i >= 0 else shapes for i in held]
        result[key] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)
    return result


def from_slots(model: Model, layout: Layout, slots: SlotTree) -> dict:
    """The inverse of `to_slots`: a tree by piece in model order, tied parameters at their owner."""
    found = {}
    for key, held in layout.placement:
        for device, i in enumerate(held):
            if i >= 0:
                own = jax.tree.map(lambda a, d=device: a[d], slots[key])
                tied = {name for name, _ in model.pieces[i].tied}
                found[i] = {n: v for n, v in own.items() if n not in tied}
    return {p.name: found.get(i, {}) for i, p in enumerate(model.pieces)}


def owned(model: Model, layout: Layout, slots: SlotTree) -> SlotTree:
    """Shaped like `slots` with float32[P] leaves: 1 where a device's copy counts, else 0.

    Empty slots and copies of tied parameters do not count.
    """
    tied = [dict(piece.tied) for piece in model.pieces]
    result = {}
    for key, held in layout.placement:
        result[key] = {}
        for name, tree in slots[key].items():
            counts = np.array([i >= 0 and name not in tied[i] for i in held], np.float32)
            result[key][name] = jax.tree.map(lambda _, c=counts: c, tree)
    return result


def tied_users(model: Model, layout: Layout) -> list[dict[tuple[str, str], np.ndarray]]:
    """For each tied parameter: (slot key, parameter) -> float32[P], 1 where a device holds a copy.

    The owner's own is one of them. The keys depend on the kinds of the holders only, not on where they are:
    plans that share a step need arguments of one structure.
    """
    owners = {(piece.name, name): owner for piece in model.pieces for name, owner in piece.tied}
    owners |= {owner: owner for owner in owners.values()}
    kinds = {piece.name: piece.kind for piece in model.pieces}
    groups: dict[tuple[str, str], dict[tuple[str, str], np.ndarray]] = {o: {} for o in owners.values()}
    for key, held in layout.placement:
        names = [model.pieces[i].name if i >= 0 else None for i in held]
        for (piece, parameter), owner in owners.items():
            if kinds[piece] == _kind(key):
                flags = groups[owner].setdefault((key, parameter), np.zeros(len(held), np.float32))
                flags += np.array([name == piece for name in names])
    return [groups[owner] for owner in sorted(groups)]
