"""Plans with the attention of different micro-batches on different devices, fitted to a memory limit."""

from dataclasses import replace

import numpy as np

from jaxpipe.costs.table import CostTable
from jaxpipe.planning import helix
from jaxpipe.planning.build import staged_plan
from jaxpipe.planning.plan import Plan
from jaxpipe.planning.refit import refit
from jaxpipe.planning.schedules import split_backward
from jaxpipe.planning.stages import CORE

ROOM = (1.0, 0.85, 0.7)
"""Parts of the memory limit that recompute is fitted to: padding takes the rest."""


def rotated_plans(
    costs: CostTable, devices: int, microbatches: int, recompute: bool, split: bool
) -> list[Plan]:
    """HelixPipe's naive and two-fold plans; none where the model or the numbers do not allow them.

    recompute: with recompute policies that fit the memory limit, and that of the paper, too; else without.
    split: with I and W apart.
    """
    if not any(piece.kind == CORE for piece in costs.pieces):
        return []
    try:
        layers, bounds, homes, floating = helix.layout(costs, devices)
    except ValueError:  # cores with parameters or side by side: attention stays at home
        return []
    found = []
    for fold in (1, 2):
        if microbatches % (fold * devices):
            continue
        rows = helix.helix(layers, devices, microbatches, fold)
        blank = staged_plan(
            f"helix_{fold}", costs, microbatches, homes, rows, bounds, floating_stages=floating
        )
        for policies in _policies(blank, costs, recompute):
            plan = replace(blank, recompute=policies)
            found.append(replace(plan, schedule=split_backward(rows)) if split else plan)
    return list(dict.fromkeys(found))


def _policies(plan: Plan, costs: CostTable, recompute: bool) -> list[tuple[str, ...]]:
    found = [("none",) * len(costs.pieces)]
    if recompute and costs.memory_limit_bytes is not None:
        found.append(helix.recompute_without_attention(costs))
        flight_DxN, state_D = _held(plan, costs)
        for room in ROOM:
            full = refit(costs, flight_DxN, state_D, room * costs.memory_limit_bytes)
            found.append(tuple("full" if again else "none" for again in full))
    return found


def _held(plan: Plan, costs: CostTable) -> tuple[np.ndarray, np.ndarray]:
    """By device and piece the micro-batches that are all in flight at once, and by device the state."""
    flight_DxN = np.zeros((plan.devices, len(costs.pieces)))
    for device, row in enumerate(plan.schedule):
        for action in row:
            if action.phase == "F":
                flight_DxN[device, list(plan.stage_pieces(action.stage))] += 1
    state_D = np.zeros(plan.devices)
    for stage, device in enumerate(plan.stage_to_device):
        state_D[device] += costs.state_factor * sum(
            costs.pieces[i].param_bytes for i in plan.stage_pieces(stage)
        )
    return flight_DxN, state_D
