"""A plan with every piece in a stage of its own."""

from dataclasses import replace
from itertools import pairwise

from jaxpipe.planning.plan import Action, Plan


def by_piece(plan: Plan) -> Plan:
    """The same work in the same order; what one action did, several do, one right after the other.

    A search on the order of actions may then move them apart.
    """
    pieces = [range(low, high) for low, high in pairwise(plan.stage_bounds)]

    def split(action: Action) -> list[Action]:
        own = pieces[action.stage] if action.phase == "F" else reversed(pieces[action.stage])
        return [Action(piece, action.phase, action.microbatch) for piece in own]

    return replace(
        plan,
        stage_bounds=tuple(range(len(plan.pieces) + 1)),
        stage_to_device=tuple(device for device, own in zip(plan.stage_to_device, pieces) for _ in own),
        schedule=tuple(tuple(one for action in row for one in split(action)) for row in plan.schedule),
    )
