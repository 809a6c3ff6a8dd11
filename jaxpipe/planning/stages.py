"""What the stages of a plan cost: sums over their pieces, recompute included."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from jaxpipe.costs.table import CostTable, PieceCost
from jaxpipe.planning.plan import Plan

CORE = "attention_core"
"""Kind of the pieces that may run anywhere, where they have no parameters."""


class StageCost(NamedTuple):
    """Costs of one stage and one micro-batch.

    F, I, W, B: time of each phase in the unit of the cost table; B is I and W at once. Pieces with
      recompute "full" run their forward again in I, or in B.
    output_bytes: bytes that travel to the next stage, and back as their gradient.
    state_bytes: resident bytes of parameters, gradients and optimizer state.
    stash_bytes: bytes held from the start of F to the end of I, or of B.
    grad_stash_bytes: all bytes held from the start of I to the end of W, where the two run apart.
    made_bytes: those of `grad_stash_bytes` that I makes. They are held beside all of `stash_bytes` while I
      runs. The others are part of the stash that I does not free: held from the start of F to the end of W.
    """

    F: float
    I: float
    W: float
    B: float
    output_bytes: float
    state_bytes: float
    stash_bytes: float
    grad_stash_bytes: float
    made_bytes: float


def stage_costs(plan: Plan, costs: CostTable) -> tuple[StageCost, ...]:
    """Costs of every stage of `plan`, in order.

    Raises:
      ValueError: when the cost table is not about the pieces of the plan.
    """
    names = tuple(piece.name for piece in costs.pieces)
    if names != plan.pieces:
        raise ValueError(
            f"the cost table and the plan {plan.name!r} differ: {_difference(names, plan.pieces)}"
        )
    return costs_of_stages(costs, plan.stage_bounds, plan.recompute)


def costs_of_stages(
    costs: CostTable, bounds: Sequence[int], recompute: Sequence[str]
) -> tuple[StageCost, ...]:
    """Costs of the stages between `bounds`, with a recompute policy for each piece.

    A piece with recompute "full" stashes only its input, the output of the piece before it (the
    first piece reads the batch and stashes nothing). What an action needs only while it runs, the
    residuals that a recomputed piece makes again among it, is workspace and not counted. But those that its W
    needs I leaves to it: after I it holds as much as if it were not recomputed.
    """
    return tuple(_stage_cost(costs, range(*run), recompute) for run in pairwise(bounds))


def _stage_cost(costs: CostTable, indices: range, recompute: Sequence[str]) -> StageCost:
    pieces = [costs.pieces[i] for i in indices]
    full = [recompute[i] == "full" for i in indices]
    held = [held_bytes(costs, i, recompute[i]) for i in indices]
    forward = sum(p.F for p in pieces)
    gradient = sum(p.I + p.F * again for p, again in zip(pieces, full))
    weight = sum(p.W for p in pieces)
    return StageCost(
        F=forward,
        I=gradient,
        W=weight,
        B=gradient + weight,
        output_bytes=pieces[-1].output_bytes,
        state_bytes=costs.state_factor * sum(p.param_bytes for p in pieces),
        stash_bytes=sum(stash for stash, _ in held),
        grad_stash_bytes=sum(gradient for _, gradient in held),
        # What one piece frees is no room for another's: both are there while I runs.
        made_bytes=sum(max(0, gradient - stash) for stash, gradient in held),
    )


def held_bytes(costs: CostTable, piece: int, policy: str) -> tuple[float, float]:
    """Bytes that the piece of a number holds from F to I, and from I to W, under a recompute policy."""
    cost = costs.pieces[piece]
    return input_bytes(costs, piece) if policy == "full" else cost.stash_bytes, cost.grad_stash_bytes


def input_bytes(costs: CostTable, piece: int) -> int:
    """Bytes that the piece of a number reads from the piece before it; the first reads the batch only."""
    return costs.pieces[piece - 1].output_bytes if piece else 0


def piece_time(piece: PieceCost, policy: str) -> float:
    """Time of all phases of a piece under a recompute policy."""
    return piece.total + (piece.F if policy == "full" else 0.0)


def _difference(table: tuple[str, ...], plan: tuple[str, ...]) -> str:
    for i, (left, right) in enumerate(zip(table, plan)):
        if left != right:
            return f"piece {i} is {left!r} in the table and {right!r} in the plan"
    return f"{len(table)} pieces in the table, {len(plan)} in the plan"
