"""OctoPipe: partition, placement and schedule tuned in turn, always the one that causes most idle time.

The tuner of OctoPipe (arXiv 2509.23722, named AdaPtis in its first version), Algorithm 1: simulate the plan,
tell from its idle time which of the three phases is the bottleneck, tune that phase, keep what the simulator
calls faster and roll back what it does not, start again. `bottleneck` is the rule that selects the phase, as
another implementation of version 3 of the paper has it (SlackPipe, octopipe_tuner). Moves, starts and limits
on tries follow the simulators that the authors published (github.com/guojihu-hana: PipelineSimulator,
tuning.py and Executor.py, and SimPipe, tuning/), and so do schedules, see `octopipe_dispatch`. What these
leave open is read in the simplest way:

- A *layer* is what `layers` calls one; the embedding and the head count as layers of their own.
- Starts: S-1F1B as it is, and for every number of stages a device that the layers allow the even partition
  placed in turn (0 1 2 0 1 2 on three devices). Each of these is tuned by itself and the best is taken. So
  tuning changes where stages are and what they hold, not their number.
- A phase ends at the first try that is faster. One without any is left out until something else has changed,
  and the next in the order partition, placement, schedule has its turn. When all three are, tuning is over.
- A new partition or placement gets a new schedule by the policy in force; single edits of rows are lost.
- A plan over the memory limit is worse than any that is less so; as long as there is none that fits, layers
  move from the device that needs most to the one that needs least. Nothing is recomputed.
"""

import math
from collections.abc import Iterator
from itertools import islice

import numpy as np

from jaxpipe.costs.table import CostTable
from jaxpipe.planning.build import staged_plan
from jaxpipe.planning.engine import Rows, encode
from jaxpipe.planning.layers import even_layers, layer_starts
from jaxpipe.planning.octopipe_dispatch import POLICIES
from jaxpipe.planning.octopipe_state import Problem, State, evaluate, idle_time, schedule
from jaxpipe.planning.plan import Plan
from jaxpipe.planning.schedules import one_f_one_b

PHASES = ("partition", "placement", "schedule")
"""In the order in which they are tried where the bottleneck cannot be tuned any further."""

PARTITIONS = 10
"""Tries before the partition phase gives up: the window of the authors' check for convergence."""
PLACEMENTS = 32
"""Tries before the placement phase gives up: the beam width of the authors."""
EDITS, REACH = 64, 4
"""Tries of single edits of a schedule, and how many places an action is advanced at most; both are ours."""
ITERATIONS = 100
"""Most phases tuned from one start, as in the authors' loop."""


def octopipe(costs: CostTable, devices: int, microbatches: int) -> Plan:
    """The plan that the tuner of OctoPipe finds (arXiv 2509.23722, Algorithm 1), as this module reads it.

    Never slower than `s_1f1b` where that fits the memory limit. Memory is the ideal model of `simulate`.

    Raises:
      ValueError: there are fewer layers than devices, or nothing that was tried fits the memory limit.
    """
    problem = Problem(costs, devices, microbatches)
    bounds, one_each = even_layers(costs.pieces, devices), tuple(range(devices))
    best = evaluate(problem, bounds, one_each, POLICIES[-1], encode(one_f_one_b(devices, microbatches)))
    for each in range(1, (len(layer_starts(costs.pieces)) - 1) // devices + 1):
        bounds = even_layers(costs.pieces, each * devices)
        tuned = tune(problem, evaluate(problem, bounds, one_each * each, POLICIES[0]))
        if tuned.better_than(best):
            best = tuned
    if best.over:
        device = int(best.needed_D.argmax())
        needed = math.ceil(best.needed_D[device])
        raise ValueError(
            f"no plan that octopipe tried fits: device {device} needs at least {needed} bytes; "
            f"the limit is {costs.memory_limit_bytes} bytes"
        )
    return staged_plan("octopipe", costs, microbatches, best.homes, schedule(best.rows), best.bounds)


def tune(problem: Problem, state: State) -> State:
    """The loop of Algorithm 1 of OctoPipe (arXiv 2509.23722): the best state on the way from a start."""
    exhausted: set[str] = set()
    for _ in range(ITERATIONS):
        phases = [phase for phase in (bottleneck(problem, state), *PHASES) if phase not in exhausted]
        if not phases:
            break
        tries = {"partition": partitions, "placement": placements, "schedule": schedules}[phases[0]]
        faster = next((other for other in tries(problem, state) if other.better_than(state)), None)
        if faster is None:
            exhausted.add(phases[0])
        else:
            state, exhausted = faster, set()
    return state


def bottleneck(problem: Problem, state: State) -> str:
    """The phase to tune, by the idle time of the devices.

    The rule of OctoPipe (arXiv 2509.23722v3, Algorithm 1): the partition where the idle times of two devices
    in a step differ by more than the time of a layer, else the placement where devices idle more before their
    first and after their last action than in between, else the schedule. The layer is the shortest, its time
    that of one micro-batch. Where a plan does not fit in memory we say the partition.
    """
    if state.over:
        return "partition"
    idle_D, boundary_D = idle_time(state)
    layer = min(_layer_times(problem.costs))
    if idle_D.max() - idle_D.min() > layer:
        return "partition"
    return "placement" if boundary_D.sum() > (idle_D - boundary_D).sum() else "schedule"


def partitions(problem: Problem, state: State) -> Iterator[State]:
    """Plans in which one layer has gone from a device that idles little to one that idles much.

    The move of the authors' tune_partition: the device that idles most takes, from the one that idles least
    first. The layers between shift by one, so that stages stay consecutive. A device with several stages
    gives from that with most time and takes into that with least; their function has one stage a device. Over
    the memory limit, here and in `placements`, bytes stand in for time.
    """
    return islice(_partitions(problem, state), PARTITIONS)


def _partitions(problem: Problem, state: State) -> Iterator[State]:
    starts = _layer_bounds(problem.costs)
    cuts = np.searchsorted(starts, state.bounds)
    idle_D = -state.needed_D if state.over else idle_time(state)[0]
    order = np.argsort(-idle_D, kind="stable").tolist()
    stages = range(len(state.homes))
    for taker in order:
        for giver in reversed(order):
            gives = [s for s in stages if state.homes[s] == giver and cuts[s + 1] - cuts[s] > 1]
            takes = [s for s in stages if state.homes[s] == taker]
            if giver == taker or not gives or not takes:
                continue
            source, target = (
                max(gives, key=state.load_S.__getitem__),
                min(takes, key=state.load_S.__getitem__),
            )
            moved = cuts.copy()
            if source < target:
                moved[source + 1 : target + 1] -= 1
            else:
                moved[target + 1 : source + 1] += 1
            yield evaluate(problem, tuple(starts[moved].tolist()), state.homes, state.policy)


def placements(problem: Problem, state: State) -> Iterator[State]:
    """Plans in which two stages have changed places or one has gone to another device.

    The neighbours in the authors' search for placements, where each device keeps a stage. They are ranked as
    there by the time of the fullest device, and among equals by how much the two devices differ in the idle
    time at the ends of the step, which is what made this phase the bottleneck.
    """
    stages, home_S = len(state.homes), np.array(state.homes)
    edge_D = state.needed_D if state.over else idle_time(state)[1]
    load_D = np.bincount(home_S, state.load_S, problem.devices)
    # Swaps of stages a < b, then moves of stage a to device b.
    a_N, b_N = np.triu_indices(stages, 1)
    crowded_S = np.bincount(home_S, minlength=problem.devices)[home_S] > 1
    move_2N = np.argwhere(crowded_S[:, None] & (home_S[:, None] != np.arange(problem.devices))).T
    swaps = home_S[a_N] != home_S[b_N]
    a_N, b_N = a_N[swaps], b_N[swaps]
    move_N = np.repeat([False, True], [len(a_N), move_2N.shape[1]])
    from_N = home_S[np.concatenate([a_N, move_2N[0]])]
    to_N = np.concatenate([home_S[b_N], move_2N[1]])
    flow_N = np.concatenate([state.load_S[a_N] - state.load_S[b_N], state.load_S[move_2N[0]]])
    a_N, b_N = np.concatenate([a_N, move_2N[0]]), np.concatenate([b_N, move_2N[1]])
    fullest_N = _fullest(load_D, from_N, to_N, flow_N)
    for n in np.lexsort((-np.abs(edge_D[from_N] - edge_D[to_N]), fullest_N))[:PLACEMENTS]:
        homes_S = home_S.copy()
        homes_S[a_N[n]] = to_N[n]
        if not move_N[n]:
            homes_S[b_N[n]] = from_N[n]
        yield evaluate(problem, state.bounds, tuple(homes_S.tolist()), state.policy)


def _fullest(load_D: np.ndarray, from_N: np.ndarray, to_N: np.ndarray, flow_N: np.ndarray) -> np.ndarray:
    """Load of the fullest device after each of N moves of a load from one device to another: [N]."""
    load_ND = np.tile(load_D, (len(flow_N), 1))
    every = np.arange(len(flow_N))
    load_ND[every, from_N] -= flow_N
    load_ND[every, to_N] += flow_N
    return load_ND.max(axis=1, initial=0.0)


def schedules(problem: Problem, state: State) -> Iterator[State]:
    """The plan with the best of the other policies; behind it, single actions advanced into idle time.

    OctoPipe runs F earlier, takes the backward apart, puts W off to fill idle time and runs W early to free
    memory; which of these is done is a policy here. Then, where a device idles inside the step, the longest
    time first, one of the next few actions is put in front, if the simulator finds that this pays.
    """
    others = [evaluate(problem, state.bounds, state.homes, p) for p in POLICIES if p != state.policy]
    yield min(others, key=lambda other: (other.over, other.makespan))
    if state.rows is not None:
        for rows in islice(_edits(state), EDITS):
            yield evaluate(problem, state.bounds, state.homes, state.policy, rows)


def _edits(state: State) -> Iterator[Rows]:
    first = state.rows.first
    gap = np.diff(state.end, prepend=0.0) - (state.end - state.start)
    gap[first[:-1][np.diff(first) > 0]] = 0.0  # Before the first action nothing can be advanced.
    for at in np.argsort(-gap, kind="stable").tolist():
        if gap[at] <= 0:
            return
        stop = int(first[np.searchsorted(first, at, side="right")])
        for later in range(at + 1, min(at + 1 + REACH, stop)):
            order = np.arange(len(gap))
            order[at : later + 1] = [later, *range(at, later)]
            yield Rows(first, *(array[order] for array in state.rows[1:]))


def _layer_bounds(costs: CostTable) -> np.ndarray:
    """First piece of each layer, embedding and head included, and the number of pieces behind them."""
    return np.array(sorted({0, *layer_starts(costs.pieces), len(costs.pieces)}))


def _layer_times(costs: CostTable) -> list[float]:
    times = np.add.reduceat([piece.total for piece in costs.pieces], _layer_bounds(costs)[:-1])
    return [time for time in times.tolist() if time] or [0.0]
