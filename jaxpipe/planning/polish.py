"""Local search on the order of the actions of a plan.

Only an action on the critical path that waits for its device, not for what it reads, can make the step
shorter, so only such ones are moved, as in local search for the job-shop problem (van Laarhoven, Aarts and
Lenstra 1992, Operations Research 40(1)): a few places forward, or the action before it as many places back.
What makes the step a little longer is accepted at first (simulated annealing). Memory limits hold throughout.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numba import njit

from jaxpipe.costs.table import CostTable
from jaxpipe.planning.engine import NONE, Rows, encode
from jaxpipe.planning.memory import action_bytes
from jaxpipe.planning.plan import PHASES, Plan
from jaxpipe.planning.simulator import engine_costs
from jaxpipe.planning.stages import stage_costs

HEAT = 0.0005
"""How much longer a step may become by an accepted move at first, as a part of the makespan."""
STALE = 50
"""Moves for each action without a better order after which the search begins again at the best one,"""
REHEATS = 0.02, 0.1
"""with so much heat, in turn: plans of few actions have time for that."""
ELSEWHERE = 0.3
"""From then on, in that part of the moves another action of the device moves, too: under a memory limit it
may have to go first."""
FARTHEST = 6
"""Places that an action moves at most."""

_F, _W = PHASES.index("F"), PHASES.index("W")


def polish(plan: Plan, costs: CostTable, limits: Sequence[float], steps: int, seed: int) -> Plan:
    """The plan with a better order of actions on each device where one is found.

    limits: the most bytes that each device may hold, counted as the ideal model does.
    steps: timed actions after which the search ends; one move times all actions of the plan.
    """
    rows, stages = encode(plan.schedule), stage_costs(plan, costs)
    durations, messages = engine_costs(stages, costs)
    source, gap = _reads(rows, plan, messages)
    state_D = np.zeros(plan.devices)
    np.add.at(state_D, list(plan.stage_to_device), [stage.state_bytes for stage in stages])
    taken, freed = action_bytes(rows, stages)
    order = _polish(
        rows.first,
        rows.device().astype(np.int32),
        source,
        gap,
        durations[rows.stage, rows.phase],
        rows.stage.astype(np.int64) * plan.microbatches + rows.microbatch,
        taken,
        freed,
        np.asarray(limits, np.float64) - state_D,
        steps // max(1, len(source)),
        seed,
    )
    actions = [rows.action(number) for number in order.tolist()]
    return replace(plan, schedule=tuple(tuple(actions[low:high]) for low, high in pairwise(rows.first)))


def _reads(rows: Rows, plan: Plan, messages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The action that makes what each action reads from another stage, or NONE; the time of the message.

    What an action reads from its own stage stands before it in its row, and is never moved past it.
    """
    side = (rows.phase != _F).astype(np.int64)
    makes = rows.phase != _W
    maker = np.full((2, plan.stages + 2, plan.microbatches), NONE, np.int64)
    numbers = np.arange(len(rows.stage))
    maker[side[makes], rows.stage[makes] + 1, rows.microbatch[makes]] = numbers[makes]
    neighbour = np.where(side == 0, rows.stage - 1, rows.stage + 1)
    source = np.where(makes, maker[side, neighbour + 1, rows.microbatch], NONE)
    device = rows.device()
    away = (source != NONE) & (device[source] != device)
    return source, np.where(away, messages[np.minimum(rows.stage, neighbour)], 0.0)


@njit(cache=True, nogil=True)
def _polish(first, device_A, source_A, gap_A, time_A, cell_A, taken_A, freed_A, room_D, moves, seed):
    """The best order found: the numbers of actions, device by device.

    cell_A: a number for stage and micro-batch of each action; those of one cell keep their order.
    """
    np.random.seed(seed)
    count = len(source_A)
    order, place = np.arange(count), np.arange(count)
    end_A, waiter_A = np.empty(count), np.empty(count, np.int64)
    makespan = _times(first, order, source_A, gap_A, time_A, end_A, waiter_A)
    best_order, best = order.copy(), makespan
    path = np.empty(count, np.int64)
    reheated, begun = 0, 0
    for move in range(moves):
        if move - begun > STALE * count:
            reheated, begun = reheated + 1, move
            order[:] = best_order
            place[order] = np.arange(count)
            makespan = _times(first, order, source_A, gap_A, time_A, end_A, waiter_A)
        length = _movable(first, order, place, device_A, source_A, gap_A, time_A, end_A, path)
        if length == 0:
            break  # only what is read decides: no order is faster
        late = path[np.random.randint(length)]
        device = device_A[late]
        low, high = first[device], first[device + 1]
        row = order[low:high].copy()
        moved = _shift(low, high, order, place, cell_A, late)
        heat = HEAT * (1.0 - move / moves)
        if reheated:
            heat = REHEATS[reheated % len(REHEATS)] * (1.0 - (move - begun) / (STALE * count + 1))
            if np.random.random() < ELSEWHERE:
                other = order[np.random.randint(low + 1, high)]
                moved = _shift(low, high, order, place, cell_A, other) or moved
        if not moved:
            continue
        fits = _fits(first, order, device, taken_A, freed_A, room_D[device])
        if fits:
            changed = _times(first, order, source_A, gap_A, time_A, end_A, waiter_A)
            if changed <= makespan * (1.0 + heat * np.random.random() ** 2):
                makespan = changed
                if changed < best * (1.0 - 1e-12):
                    best, best_order, begun = changed, order.copy(), move
                continue
        order[low:high] = row
        place[row] = np.arange(low, high)
        if fits:
            _times(first, order, source_A, gap_A, time_A, end_A, waiter_A)
    return best_order


@njit(cache=True, nogil=True)
def _movable(first, order, place, device_A, source_A, gap_A, time_A, end_A, path):
    """Collects the actions of a critical path that wait for their device; returns their number."""
    length, at = 0, end_A.argmax()
    slack = 1e-9 * end_A[at]  # sums of times are not exact
    while True:
        begin = end_A[at] - time_A[at] - slack
        if begin <= 0.0:
            return length
        source = source_A[at]
        follows = place[at] > first[device_A[at]]
        if (
            source != NONE
            and end_A[source] + gap_A[at] >= begin
            and not (follows and end_A[order[place[at] - 1]] >= begin and np.random.random() < 0.5)
        ):
            at = source
            continue
        path[length] = at
        length += 1
        at = order[place[at] - 1]


@njit(cache=True, nogil=True)
def _shift(low, high, order, place, cell_A, late):
    """Moves an action forward in its row, or the one before it back; False, if a cell forbids it."""
    distance = 1
    while distance < FARTHEST and np.random.random() < 0.4:
        distance += 1
    if np.random.random() < 0.5:
        return _move(order, place, cell_A, place[late], max(low, place[late] - distance))
    early = place[late] - 1
    return _move(order, place, cell_A, early, min(high - 1, early + distance))


@njit(cache=True, nogil=True)
def _move(order, place, cell_A, old, new):
    """Moves what stands at one place of a row to another; False, if its cell forbids it."""
    action, step = order[old], 1 if new > old else -1
    if old == new:
        return False
    for position in range(old + step, new + step, step):
        if cell_A[order[position]] == cell_A[action]:
            return False
    for position in range(old, new, step):
        order[position] = order[position + step]
        place[order[position]] = position
    order[new] = action
    place[action] = new
    return True


@njit(cache=True, nogil=True)
def _fits(first, order, device, taken_A, freed_A, room):
    """Whether a device never holds more than `room`."""
    held = 0.0
    for position in range(first[device], first[device + 1]):
        held += taken_A[order[position]]
        if held > room * (1.0 + 1e-9):
            return False
        held -= freed_A[order[position]]
    return True


@njit(cache=True, nogil=True)
def _times(first, order, source_A, gap_A, time_A, end_A, waiter_A):
    """The makespan, infinite for a deadlock, and the end of every action in `end_A`."""
    devices = len(first) - 1
    end_A[:] = -np.inf
    waiter_A[:] = NONE
    position_D, now_D = first[:-1].copy(), np.zeros(devices)
    other_D, ready = np.full(devices, NONE, np.int64), np.arange(devices)
    left, done = devices, 0
    while left:
        left -= 1
        device = ready[left]
        position, now = position_D[device], now_D[device]
        while position < first[device + 1]:
            action = order[position]
            source = source_A[action]
            if source != NONE:
                if end_A[source] == -np.inf:
                    other_D[device], waiter_A[source] = waiter_A[source], device
                    break
                now = max(now, end_A[source] + gap_A[action])
            now += time_A[action]
            end_A[action] = now
            waiting = waiter_A[action]
            while waiting != NONE:
                ready[left] = waiting
                left += 1
                waiting = other_D[waiting]
            position += 1
            done += 1
        position_D[device], now_D[device] = position, now
    return now_D.max() if done == len(order) else np.inf
