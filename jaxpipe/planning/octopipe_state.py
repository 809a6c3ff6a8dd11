"""Plans on their way through OctoPipe's tuner: as arrays, with the times and bytes that decide about them."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from jaxpipe.costs.table import CostTable
from jaxpipe.planning.engine import NEVER, Rows, connect, run
from jaxpipe.planning.octopipe_dispatch import Policy, dispatch, one_microbatch
from jaxpipe.planning.plan import PHASES, Action, Schedule
from jaxpipe.planning.simulator import engine_costs
from jaxpipe.planning.stages import StageCost, costs_of_stages

_GAIN = 1 - 1e-9
"""A makespan within this factor of another is no better."""
_EXACT = 1 + 1e-12
"""Sums of bytes that exceed the limit by less than this factor keep it."""


class Problem(NamedTuple):
    """What a plan is sought for."""

    costs: CostTable
    devices: int
    microbatches: int


class State(NamedTuple):
    """A plan that has been simulated.

    over: bytes of the fullest device beyond the memory limit, 0 where all fits; infinite in a deadlock.
    makespan: time of a step; infinite without rows and in a deadlock.
    needed_D: bytes that each device needs, at its peak or, without rows, for a single micro-batch.
    load_S: what weighs on the device of each stage: its time for a micro-batch or, in a plan over the limit,
      its bytes of state and of one micro-batch's stash.
    bounds, homes: of the stages, as in a plan.
    policy: of the dispatch that made the rows, or will make those of plans made from this one.
    rows: actions in order; None where no micro-batch fits.
    start, end: of every action of the rows.
    """

    over: float
    makespan: float
    needed_D: np.ndarray
    load_S: np.ndarray
    bounds: tuple[int, ...]
    homes: tuple[int, ...]
    policy: Policy
    rows: Rows | None
    start: np.ndarray
    end: np.ndarray

    def better_than(self, other: "State") -> bool:
        """Whether it is less over the limit or, equally much, faster by more than rounding."""
        return (self.over, self.makespan) < (other.over, other.makespan * _GAIN)


def evaluate(
    problem: Problem,
    bounds: tuple[int, ...],
    homes: tuple[int, ...],
    policy: Policy,
    rows: Rows | None = None,
) -> State:
    """Simulates a partition and a placement, on the rows given or else on those that the policy makes.

    The times are those of `simulate` with buffered sends, the bytes those of its ideal memory.
    """
    costs, devices, microbatches = problem
    stages = costs_of_stages(costs, bounds, ("none",) * len(costs.pieces))
    limit = np.inf if costs.memory_limit_bytes is None else costs.memory_limit_bytes
    durations, messages = engine_costs(stages, costs)
    state_D = np.bincount(homes, [stage.state_bytes for stage in stages], devices)
    start = end = np.zeros(0)
    needed_D, makespan = state_D + one_microbatch(stages, homes, devices, policy), np.inf
    if rows is None and needed_D.max() <= limit:
        rows = dispatch(stages, messages, homes, devices, microbatches, policy, limit - state_D)
    if rows is not None:
        start, end = run(rows, connect(rows, len(stages), microbatches), durations, messages)
        needed_D = state_D + _peaks(rows, stages)
        makespan = np.inf if NEVER in end else float(end.max())
    needed = float(needed_D.max())
    over = needed - limit if needed > limit * _EXACT else 0.0
    if NEVER in end:
        over = np.inf
    loads = [s.state_bytes + s.stash_bytes if over else s.F + s.B for s in stages]
    return State(over, makespan, needed_D, np.array(loads), bounds, homes, policy, rows, start, end)


def idle_time(state: State) -> tuple[np.ndarray, np.ndarray]:
    """For each device all time in which it does nothing, and that before its first and after its last action.

    The bubble and the boundary bubble of OctoPipe (arXiv 2509.23722v3, Algorithm 1); what is between is its
    residual bubble.
    """
    first = state.rows.first
    filled = np.diff(first) > 0
    busy_D = np.bincount(state.rows.device(), state.end - state.start, len(filled))
    boundary_D = np.full(len(filled), state.makespan)
    begin, stop = state.start[first[:-1][filled]], state.end[first[1:][filled] - 1]
    boundary_D[filled] += begin - stop
    return state.makespan - busy_D, boundary_D


def schedule(rows: Rows) -> Schedule:
    """The rows as a schedule."""
    phases = [PHASES[phase] for phase in rows.phase.tolist()]
    actions = list(map(Action, rows.stage.tolist(), phases, rows.microbatch.tolist()))
    return tuple(tuple(actions[begin:stop]) for begin, stop in pairwise(rows.first.tolist()))


def _peaks(rows: Rows, stages: tuple[StageCost, ...]) -> np.ndarray:
    """Most bytes that each device ever stashes: [devices]. I takes at its start and frees at its end."""
    stash_S, gradient_S, made_S = np.array(
        [(stage.stash_bytes, stage.grad_stash_bytes, stage.made_bytes) for stage in stages], np.float64
    ).T
    none_S = 0 * stash_S  # columns in the order of plan.PHASES: F, I, W, B
    taken_SP = np.stack([stash_S, made_S, none_S, none_S], axis=1)
    freed_SP = np.stack([none_S, stash_S + made_S - gradient_S, gradient_S, stash_S], axis=1)
    change_SP2 = np.stack([taken_SP, -freed_SP], axis=-1)
    change_N2 = change_SP2[rows.stage, rows.phase]
    return np.array([change_N2[a:b].cumsum().max(initial=0.0) for a, b in pairwise(rows.first.tolist())])
