"""What the lowering must know of traced pieces, and what its registers hold."""

import math
from collections.abc import Sequence

import jax

from jaxpipe.models.backward import PhaseCode
from jaxpipe.models.code import Codes
from jaxpipe.models.piece import Model, producers
from jaxpipe.program.spec import PhaseSpec, PieceSpec


def piece_specs(model: Model, codes: Codes, policies: Sequence[str]) -> list[PieceSpec]:
    """What the lowering must know of each piece."""
    specs = []
    for piece, wiring, policy in zip(model.pieces, producers(model.pieces), policies, strict=True):
        code = codes[piece.kind, policy]
        values = code.group("read") | code.group("write")
        trains = policy != "forward"
        specs.append(
            PieceSpec(
                name=piece.name,
                kind=piece.kind,
                policy=policy,
                has_params=bool(code.group("param")),
                reads=wiring,
                writes=piece.writes,
                classes={n: value_class(t) for n, t in values.items()},
                phases={
                    p: _phase_spec(p, c)
                    for p, c in code.phases.items()
                    if c.results and (p != "F" or piece.writes or not trains)
                },
                residual_class=f"{piece.kind}/{policy}/residuals",
                stash_class=f"{piece.kind}/{policy}/stash",
                bytes={value_class(t): math.prod(t.shape) * t.dtype.itemsize for t in values.values()},
            )
        )
    return specs


def _phase_spec(phase: str, code: PhaseCode) -> PhaseSpec:
    results = {tag for tag, _ in code.results}
    if phase == "F":
        writes = tuple(n for tag, n in code.results if tag == "write")
        return PhaseSpec(code.names("read"), writes, residuals="residual" in results)
    return PhaseSpec(
        reads=code.names("read"),
        writes=code.names("write"),
        residuals=bool(code.names("residual")),
        stash="stash" in results or bool(code.names("stash")),
        cotangents=code.names("ct_write"),
    )


def value_class(struct: jax.ShapeDtypeStruct) -> str:
    """Register class of a value: values of one type share registers."""
    return f"{struct.dtype}[{','.join(map(str, struct.shape))}]"


def register_types(codes: Codes) -> dict[str, tuple[jax.ShapeDtypeStruct, ...]]:
    """Types of the arrays that one register of each class holds."""
    types = {}
    for (kind, policy), code in codes.items():
        for t in (code.group("read") | code.group("write")).values():
            types[value_class(t)] = (t,)
        types[f"{kind}/{policy}/residuals"] = tuple(code.group("residual").values())
        types[f"{kind}/{policy}/stash"] = tuple(code.group("stash").values())
    return types
