"""What the lowering must know of pieces of which there is only a cost table."""

from jaxpipe.costs.table import CostTable
from jaxpipe.program.spec import PhaseSpec, PieceSpec


def specs_from_costs(costs: CostTable) -> tuple[PieceSpec, ...]:
    """Pieces in a line: each reads what the one before it writes, and nothing passes by a piece.

    That is the line that `planning.simulator` assumes, so `arrange` tells from these how long a plan takes on
    ticks. They fit no model: registers hold what the table calls `output_bytes`, in one class a size, and
    every forward leaves residuals and every I a stash, whatever their sizes.

    A piece has parameters, and a W, where its W takes time or it has parameter bytes. The last piece writes
    nothing; where its F takes no time it has none, as a head whose backward does everything.
    """
    names = [f"{piece.output_bytes} bytes" for piece in costs.pieces[:-1]]
    return tuple(_spec(costs, names, index) for index in range(len(costs.pieces)))


def _spec(costs: CostTable, names: list[str], index: int) -> PieceSpec:
    """names: of the values between the pieces; the value behind piece i is names[i]."""
    piece, last = costs.pieces[index], index == len(costs.pieces) - 1
    reads = {names[index - 1]: index - 1} if index else {}
    writes = () if last else (names[index],)
    has_params = piece.W > 0 or piece.param_bytes > 0
    values = (*reads, *writes)
    has_forward = not last or piece.F > 0
    phases = {"F": PhaseSpec(tuple(reads), writes, residuals=True)} if has_forward else {}
    seen = {"residuals": True} if has_forward else {"reads": tuple(reads)}
    phases["B"] = PhaseSpec(**seen, cotangents=writes)
    phases["I"] = PhaseSpec(**seen, cotangents=writes, stash=has_params)
    if has_params:
        phases["W"] = PhaseSpec(**seen, stash=True)
    sizes = {names[i]: costs.pieces[i].output_bytes for i in (index - 1, index) if 0 <= i < len(names)}
    return PieceSpec(
        name=piece.name,
        kind=piece.name,
        policy="none",
        has_params=has_params,
        reads=reads,
        writes=writes,
        classes={name: name for name in values},
        phases=phases,
        residual_class=f"{piece.name}/residuals",
        stash_class=f"{piece.name}/stash",
        bytes=sizes,
    )
