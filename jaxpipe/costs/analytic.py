"""An analytic cost table: operations and bytes counted in the traced code of every piece.

Time of a phase = matmuls / rate + elementwise operations / rate + bytes in and out / bandwidth
+ bytes exchanged over axis `model` / link. Values inside a phase count as fused: they cost operations and no
bytes. It ranks pieces; profiles replace it where they exist.
"""

import math
from collections import Counter
from collections.abc import Sequence

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxpipe.costs.chips import CHIPS, MATMUL_EFFICIENCY, MEMORY_EFFICIENCY, Chip
from jaxpipe.costs.table import CostTable, Link, PieceCost
from jaxpipe.models.backward import PhaseCode, PieceCode
from jaxpipe.models.code import Codes
from jaxpipe.models.piece import Model, producers

MASTER_BYTES = 4
"""Master parameters, gradients and both Adam moments are float32."""

_FREE = frozenset(
    """
    axis_index broadcast_in_dim concatenate convert_element_type copy expand_dims iota optimization_barrier
    pad pcast pvary reshape rev slice split squeeze stack stop_gradient transpose unstack
    """.split()
)
_MOVES = {"all_gather": 1, "all_to_all": 1, "reduce_scatter": 1, "pmax": 2, "pmin": 2, "psum": 2}
_MOVES |= {"psum_invariant": 2}
"""Collective -> passes over the whole array: a sum is a scatter of sums, then a gather."""


def count_operations(eqns: Sequence[JaxprEqn]) -> Counter:
    """Operations of some equations.

    "bfloat16" and "float32": FLOPs of matmuls by the type of both operands, a multiply and an add being
    two. "vector": elements that anything else computes, reduces, gathers or scatters. "exchanged": bytes of
    the arrays that collectives pass around, twice for those that sum.
    A scan counts its body times its length, a conditional its dearest branch, a `while` loop, whose length
    nobody knows, its body once.
    """
    total: Counter = Counter()
    for eqn in eqns:
        name = eqn.primitive.name
        ins, outs = ([v.aval for v in variables] for variables in (eqn.invars, eqn.outvars))
        if name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            depth = math.prod(ins[0].shape[i] for i in contracted)
            low = all(aval.dtype == jnp.bfloat16 for aval in ins)
            total["bfloat16" if low else "float32"] += 2 * depth * _size(outs[0])
        elif name in _MOVES:
            total["exchanged"] += _MOVES[name] * max(sum(map(_bytes, ins)), sum(map(_bytes, outs)))
        elif name in ("gather", "dynamic_slice"):
            total["vector"] += _size(outs[0])
        elif name == "dynamic_update_slice":
            total["vector"] += _size(ins[1])
        elif name.startswith("scatter"):
            total["vector"] += _size(ins[2])
        elif inner := [j for value in eqn.params.values() for j in _jaxprs(value)]:
            times = eqn.params.get("length", 1)
            counts = [count_operations(j.eqns) for j in inner]
            chosen = max(counts, key=Counter.total) if name == "cond" else sum(counts, Counter())
            total += Counter({key: times * value for key, value in chosen.items()})
        elif name not in _FREE:
            total["vector"] += max(map(_size, (*ins, *outs)), default=0)
    return total


def _jaxprs(value) -> list[Jaxpr]:
    values = value if isinstance(value, tuple | list) else [value]
    return [
        v.jaxpr if isinstance(v, ClosedJaxpr) else v for v in values if isinstance(v, ClosedJaxpr | Jaxpr)
    ]


def phase_time(code: PieceCode, phase: PhaseCode, chip: Chip, tp: int) -> float:
    """Seconds that one phase of a piece takes on a device, one of `tp` on axis `model`."""
    operations = count_operations(phase.fragment.eqns)
    matmuls = sum(operations[dtype] / rate for dtype, rate in chip.matmul_flops.items())
    # Of a whole array, a device sends (or receives) all but its own part.
    exchanged = operations["exchanged"] * (tp - 1) / tp
    return (
        matmuls / MATMUL_EFFICIENCY
        + operations["vector"] / chip.vector_flops
        + _moved_bytes(code, phase) / (chip.memory_bandwidth * MEMORY_EFFICIENCY)
        + exchanged / chip.link_bandwidth
    )


def _moved_bytes(code: PieceCode, phase: PhaseCode) -> int:
    """Bytes in and out of a phase.

    Of an argument that is only gathered from, such as an embedding's table, the gathered rows count.
    Gradients are added to sums in float32, which are read and written.
    """
    gathered, whole = Counter(), {v for v in phase.fragment.outputs if not isinstance(v, Literal)}
    for eqn in phase.fragment.eqns:
        variables = [v for v in eqn.invars if not isinstance(v, Literal)]
        if eqn.primitive.name == "gather":
            gathered[variables.pop(0)] += _bytes(eqn.outvars[0].aval)
        whole.update(variables)
    total = 0
    for tag, variable in zip(phase.arguments, phase.fragment.inputs):
        if tag[0] != "batch":
            total += _bytes(code.types[tag]) if variable in whole else gathered[variable]
    for tag in phase.results:
        is_gradient = tag[0] == "grad"
        total += 2 * MASTER_BYTES * _size(code.types[tag]) if is_gradient else _bytes(code.types[tag])
    return total


def analytic_costs(model: Model, codes: Codes, chip_name: str, compute_bytes: int = 4) -> CostTable:
    """The cost table of a model on a chip, without recomputation, in seconds.

    Bytes are those of one device: with tensor parallelism, its shards. A piece that only has losses does
    everything in I (`PieceCode`), so its F is 0.

    Args:
      model: its pieces in order.
      codes: their traced code under policy "none".
      chip_name: a key of CHIPS.
      compute_bytes: bytes of an element of the parameters' compute copy; none is held when it is 4.

    Raises:
      ValueError: for a chip that is not in CHIPS.
    """
    if chip_name not in CHIPS:
        raise ValueError(f"unknown chip {chip_name!r}; expected one of {', '.join(CHIPS)}")
    chip = CHIPS[chip_name]
    held, crossing = _held_bytes(model, codes), _crossing_bytes(model, codes)
    pieces = []
    for i, piece in enumerate(model.pieces):
        code = codes[piece.kind, "none"]
        times = {p: phase_time(code, c, chip, piece.module.tp) for p, c in code.phases.items()}
        pieces.append(
            PieceCost(
                name=piece.name,
                kind=piece.kind,
                F=times["F"] if piece.writes else 0.0,
                I=times["I"],
                W=times.get("W", 0.0),
                param_bytes=sum(MASTER_BYTES * _size(t) for t in code.group("param").values()),
                stash_bytes=held[i][0],
                grad_stash_bytes=held[i][1],
                output_bytes=crossing[i],
            )
        )
    factor = 4 + (compute_bytes / MASTER_BYTES if compute_bytes < MASTER_BYTES else 0)
    return CostTable(
        "s", tuple(pieces), Link(chip.link_latency, chip.link_bandwidth), chip.memory_bytes, factor
    )


def _held_bytes(model: Model, codes: Codes) -> list[tuple[int, int]]:
    """Bytes that each piece holds from F to I, and from I to W, as the executor holds them.

    From I to W these are the registers that W reads: values of the forward, cotangents of what the piece
    writes, what I made for it, and the residuals, which share a register, so all of them or none.

    A value that several pieces hold counts once: for the first whose W reads it, since that one holds it
    longest, or for the first of all where none does.
    """
    pieces = [(codes[p.kind, "none"], w) for p, w in zip(model.pieces, producers(model.pieces))]
    values = [{phase: _values_read(i, *piece, phase) for phase in "BW"} for i, piece in enumerate(pieces)]
    owner: dict[tuple[int, str], int] = {}
    for phase in "WB":
        for i, found in enumerate(values):
            for value in found[phase]:
                owner.setdefault(value, i)
    result = []
    for i, (code, _) in enumerate(pieces):
        stash, left = (
            sum(size for value, size in values[i][phase].items() if owner[value] == i) for phase in "BW"
        )
        residuals = sum(map(_bytes, code.group("residual").values()))
        if late := code.phases.get("W"):
            left += sum(map(_bytes, code.group("stash").values()))
            left += sum(_bytes(code.types["ct_write", n]) for n in late.names("ct_write"))
            left += residuals if late.names("residual") else 0
        result.append((stash + residuals, left))
    return result


def _values_read(i: int, code: PieceCode, wiring: dict[str, int], phase: str) -> dict[tuple[int, str], int]:
    """(writer, name) -> bytes of each value of the forward that a phase of piece i reads."""
    if phase not in code.phases:
        return {}
    read, written = (code.phases[phase].names(tag) for tag in ("read", "write"))
    found = {(wiring[n], n): _bytes(code.types["read", n]) for n in read}
    return found | {(i, n): _bytes(code.types["write", n]) for n in written}


def _crossing_bytes(model: Model, codes: Codes) -> list[int]:
    """Bytes of the values behind each piece that later pieces read."""
    wiring = producers(model.pieces)
    last = {(producer, name): i for i, w in enumerate(wiring) for name, producer in w.items()}
    size = {
        (i, name): _bytes(t)
        for i, piece in enumerate(model.pieces)
        for name, t in codes[piece.kind, "none"].group("write").items()
    }
    return [sum(size[v] for v, end in last.items() if v[0] <= i < end) for i in range(len(model.pieces))]


def _size(struct) -> int:
    return math.prod(struct.shape)


def _bytes(struct) -> int:
    return _size(struct) * struct.dtype.itemsize
