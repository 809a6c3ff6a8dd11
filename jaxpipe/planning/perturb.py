"""How plans stand up to costs that are not quite as the cost table says."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np

from jaxpipe.costs.table import CostTable, PieceCost
from jaxpipe.planning.engine import NEVER, connect, encode, run
from jaxpipe.planning.layers import EMBEDDING, HEAD
from jaxpipe.planning.plan import Plan
from jaxpipe.planning.simulator import engine_costs
from jaxpipe.planning.stages import stage_costs

LEAST = 0.1
"""Factors are at least this, so that no time turns negative however wide the spread."""


def perturbed(costs: CostTable, spread: float, rng: np.random.Generator) -> CostTable:
    """The table with F, I and W of every piece multiplied by factors of their own.

    Each is 1 + spread * N, at least LEAST, with a normal N. The shards of a split vocabulary are one piece in
    this, as all run the same code on as much data. Messages and memory stay.

    Raises:
      ValueError: the spread is negative.
    """
    names = _wholes(costs.pieces)
    factor_Nx3 = _factors(len(names), spread, rng)
    factors = [factor_Nx3[names[_whole(piece)]].tolist() for piece in costs.pieces]
    pieces = (
        replace(piece, F=piece.F * f, I=piece.I * i, W=piece.W * w)
        for piece, (f, i, w) in zip(costs.pieces, factors)
    )
    return replace(costs, pieces=tuple(pieces))


def spreads(
    plans: Mapping[str, tuple[Plan, CostTable]],
    spread: float,
    draws: int,
    seed: int,
    tell: Callable[[str], None] = lambda name: None,
) -> dict[str, np.ndarray]:
    """The makespans of plans with perturbed costs, the k-th of each with the same k-th draw of factors.

    The order of actions stays that of the plan, only times change; sends are buffered. Pieces of the same
    name have the same factors in all plans, and shards those of their piece, as in `perturbed`.

    tell: is called with every plan's name when its draws are done.

    Raises:
      ValueError: as `perturbed` and `simulate`, and when there are no draws.
    """
    if draws < 1:
        raise ValueError(f"{draws} draws tell nothing; expected at least 1")
    names = _wholes(piece for _, costs in plans.values() for piece in costs.pieces)
    rng = np.random.default_rng(seed)
    factor_KxNx3 = np.array([_factors(len(names), spread, rng) for _ in range(draws)])
    found = {}
    for name, (plan, costs) in plans.items():
        numbers = [names[_whole(piece)] for piece in costs.pieces]
        found[name] = _makespans(plan, costs, factor_KxNx3[:, numbers])
        tell(name)
    return found


def _whole(piece: PieceCost) -> str:
    """The name of a piece or, of a shard `NAME/0` of a vocabulary, that of what it is a shard of."""
    name, _, number = piece.name.rpartition("/")
    return name if piece.kind in (HEAD, EMBEDDING) and name and number.isdigit() else piece.name


def _wholes(pieces: Iterable[PieceCost]) -> dict[str, int]:
    """Numbers for the names of all pieces, in the order in which they first come."""
    return {name: n for n, name in enumerate(dict.fromkeys(_whole(piece) for piece in pieces))}


def _factors(count: int, spread: float, rng: np.random.Generator) -> np.ndarray:
    if spread < 0:
        raise ValueError(f"a spread of {spread:g} is negative")
    return np.maximum(LEAST, 1.0 + spread * rng.standard_normal((count, 3)))


def _makespans(plan: Plan, costs: CostTable, factor_KxNx3: np.ndarray) -> np.ndarray:
    """The makespan of each of K draws of factors for the N pieces."""
    rows = encode(plan.schedule)
    links = connect(rows, plan.stages, plan.microbatches)
    _, messages = engine_costs(stage_costs(plan, costs), costs)
    time_KxNx3 = factor_KxNx3 * [(piece.F, piece.I, piece.W) for piece in costs.pieces]
    again_N = [policy == "full" for policy in plan.recompute]
    time_KxNx3[:, again_N, 1] += time_KxNx3[:, again_N, 0]
    time_KxSx3 = np.add.reduceat(time_KxNx3, plan.stage_bounds[:-1], axis=1)
    # B is I and W at once.
    time_KxSx4 = np.concatenate([time_KxSx3, time_KxSx3[..., 1:].sum(-1, keepdims=True)], axis=-1)
    found = []
    for time_Sx4 in time_KxSx4:
        _, end = run(rows, links, time_Sx4, messages)
        if NEVER in end:
            raise ValueError(f"the schedule of plan {plan.name!r} deadlocks")
        found.append(end.max(initial=0.0))
    return np.array(found)
