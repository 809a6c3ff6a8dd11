"""An analytic cost table: operations and bytes counted in the traced code of every piece.

Time of a phase = matmuls / rate + elementwise operations / rate + bytes in and out / bandwidth
+ bytes exchanged over axis `model` / link. It ranks pieces; profiles replace it where they exist.
"""

import math
from collections import Counter
from collections.abc import Sequence

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

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
    pad pcast pvary reshape slice squeeze stop_gradient transpose
    """.split()
)
_COLLECTIVES = frozenset(
    """
    all_gather all_to_all pmax pmin psum psum_invariant psum_scatter reduce_scatter
    """.split()
)


def count_operations(eqns: Sequence[JaxprEqn]) -> Counter:
    """Operations of some equations: "matmul" and "vector" in FLOPs, "exchanged" in bytes.

    A multiply and an add are two operations; a loop counts its body times its length.
    """
    total: Counter = Counter()
    for eqn in eqns:
        name = eqn.primitive.name
        inner = [j for value in eqn.params.values() for j in _jaxprs(value)]
        if name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            depth = math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
            total["matmul"] += 2 * depth * math.prod(eqn.outvars[0].aval.shape)
        elif inner:
            times = eqn.params.get("length", 1)
            counts = [count_operations(j.eqns) for j in inner]
            chosen = max(counts, key=lambda c: sum(c.values())) if name == "cond" else sum(counts, Counter())
            total += Counter({key: times * value for key, value in chosen.items()})
        elif name in _COLLECTIVES:
            total["exchanged"] += sum(_bytes(v.aval) for v in eqn.outvars)
        elif name not in _FREE:
            shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars) if hasattr(v.aval, "shape")]
            total["vector"] += max((math.prod(s) for s in shapes), default=0)
    return total


def _jaxprs(value) -> list[Jaxpr]:
    values = value if isinstance(value, tuple | list) else [value]
    return [
        v.jaxpr if isinstance(v, ClosedJaxpr) else v for v in values if isinstance(v, ClosedJaxpr | Jaxpr)
    ]


def phase_time(code: PieceCode, phase: PhaseCode, chip: Chip) -> float:
    """Seconds that one phase takes."""
    operations = count_operations(phase.fragment.eqns)
    moved = sum(_bytes(code.types[t]) for t in (*phase.arguments, *phase.results) if t[0] != "batch")
    dtypes = [code.types[t].dtype for t in code.types if t[0] in ("read", "write")]
    rate = chip.matmul_flops["bfloat16" if any(d == jax.numpy.bfloat16 for d in dtypes) else "float32"]
    return (
        operations["matmul"] / (rate * MATMUL_EFFICIENCY)
        + operations["vector"] / chip.vector_flops
        + moved / (chip.memory_bandwidth * MEMORY_EFFICIENCY)
        + operations["exchanged"] / chip.link_bandwidth
    )


def analytic_costs(model: Model, codes: Codes, chip_name: str, compute_bytes: int = 4) -> CostTable:
    """The cost table of a model on a chip, without recomputation, in seconds.

    Args:
      model: its pieces in order.
      codes: their traced code under policy "none".
      chip_name: a key of CHIPS.
      compute_bytes: bytes of an element of the parameters' compute copy; none is held when it is 4.

    Raises:
      ValueError: for a chip that is not in CHIPS.
    """
    if chip_name not in CHIPS:
        raise ValueError(f"unknown chip {chip_name!r}; known: {', '.join(CHIPS)}")
    chip = CHIPS[chip_name]
    stashed, crossing = _stashed_bytes(model, codes), _crossing_bytes(model, codes)
    pieces = []
    for i, piece in enumerate(model.pieces):
        code = codes[piece.kind, "none"]
        times = {p: phase_time(code, c, chip) for p, c in code.phases.items()}
        pieces.append(
            PieceCost(
                name=piece.name,
                kind=piece.kind,
                F=times["F"] if piece.writes else 0.0,
                I=times["I"],
                W=times.get("W", 0.0),
                param_bytes=sum(MASTER_BYTES * math.prod(t.shape) for t in code.group("param").values()),
                stash_bytes=stashed[i],
                grad_stash_bytes=sum(map(_bytes, code.group("stash").values())),
                output_bytes=crossing[i],
            )
        )
    factor = 4 + (compute_bytes / MASTER_BYTES if compute_bytes < MASTER_BYTES else 0)
    return CostTable(
        "s", tuple(pieces), Link(chip.link_latency, chip.link_bandwidth), chip.memory_bytes, factor
    )


def _stashed_bytes(model: Model, codes: Codes) -> list[int]:
    """Bytes that each piece keeps from F to its backward; a value that several keep counts once."""
    result, counted = [], set()
    for i, (piece, wiring) in enumerate(zip(model.pieces, producers(model.pieces))):
        code = codes[piece.kind, "none"]
        kept = [(wiring[n], n, "read") for n in code.phases["B"].names("read")]
        kept += [(i, n, "write") for n in code.phases["B"].names("write")]
        total = sum(map(_bytes, code.group("residual").values()))
        for producer, name, tag in kept:
            if (producer, name) not in counted:
                counted.add((producer, name))
                total += _bytes(code.types[tag, name])
        result.append(total)
    return result


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


def _bytes(struct) -> int:
    return math.prod(struct.shape) * struct.dtype.itemsize
