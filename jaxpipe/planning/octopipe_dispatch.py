"""Orders of the actions made by dispatching: the schedules among which OctoPipe chooses.

In the simulator that the authors of OctoPipe (arXiv 2509.23722) published a device that falls idle takes the
next action that is ready (github.com/guojihu-hana/PipelineSimulator, simulator/abstract/Device.py). How it
chooses among several is a policy of a few switches, the same as here.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numba import njit

from jaxpipe.planning.engine import Rows
from jaxpipe.planning.plan import PHASES
from jaxpipe.planning.stages import StageCost

FUSED, W_LAST, W_NEXT = range(3)
_F, _I, _W, _B = range(len(PHASES))


class Policy(NamedTuple):
    """How an idle device chooses among the actions that are ready.

    alternate: after an F an I goes first and after an I an F; otherwise an I always goes first.
    backward: FUSED, I and W are one action B; W_LAST, a W is put off until nothing else is ready; W_NEXT, a W
      directly follows its I, so that memory is free sooner.
    warmup: device d of p takes on at most warmup * p - d micro-batches at once, 0 for no such limit.
    """

    alternate: bool
    backward: int
    warmup: int


POLICIES = tuple(
    Policy(alternate, backward, warmup)
    for warmup, backward, alternate in product((0, 2, 1), (W_LAST, W_NEXT, FUSED), (True, False))
)


def one_microbatch(
    stages: Sequence[StageCost], homes: Sequence[int], devices: int, policy: Policy
) -> np.ndarray:
    """Bytes of stashes that `dispatch` needs on each device to take on one micro-batch there: [devices]."""
    kept_2S, transient_S = _held(stages, policy)
    return np.bincount(homes, kept_2S[0], devices) + _transient(transient_S, homes, devices)


def dispatch(
    stages: Sequence[StageCost],
    messages: np.ndarray,
    homes: Sequence[int],
    devices: int,
    microbatches: int,
    policy: Policy,
    room: Sequence[float],
) -> Rows:
    """The rows that a policy makes, with no device ever holding more stashes than there is room for.

    Each stage takes its micro-batches in order. Of several F that are ready the one of the earliest
    micro-batch runs, of several I that of the latest stage. A device takes on a micro-batch, at the F of the
    first of its stages, only if all that this one will keep there fits beside all that those under way will.
    So the earliest can always go on, and nothing deadlocks, as it may in the authors' simulator, where any F
    runs that fits at the moment.

    Args:
      messages: [stages], time of a message over the boundary behind each stage, the last entry 0.
      homes: device of each stage.
      room: bytes of each device beside its state, at least those of `one_microbatch`; may be infinite.
    """
    home_S = np.array(homes, np.int64)
    time_SP = np.array([(stage.F, stage.I, stage.W, stage.B) for stage in stages], np.float64)
    limit_D = np.full(devices, microbatches)
    if policy.warmup:
        limit_D = np.maximum(policy.warmup * devices - np.arange(devices), 1)
    kept_2S, transient_S = _held(stages, policy)
    room_D = np.array(room, np.float64) - _transient(transient_S, homes, devices)
    code_DN, count_D = _dispatch(
        time_SP, messages, home_S, kept_2S, room_D, limit_D, microbatches, *policy[:2]
    )
    codes = np.concatenate([row[:count] for row, count in zip(code_DN, count_D)])
    step, microbatch = np.divmod(codes, microbatches)
    stage, phase = np.divmod(step, len(PHASES))
    first = np.concatenate([[0], np.cumsum(count_D)])
    return Rows(first, *(array.astype(np.int32) for array in (stage, phase, microbatch)))


def _held(stages: Sequence[StageCost], policy: Policy) -> tuple[np.ndarray, np.ndarray]:
    """What one micro-batch holds of each stage: from F and from the end of I on, [2, stages]; and beside that
    while I runs, [stages]."""
    stash_S, gradient_S, made_S = np.array(
        [(stage.stash_bytes, stage.grad_stash_bytes, stage.made_bytes) for stage in stages], np.float64
    ).T
    if policy.backward == FUSED:
        return np.stack([stash_S, 0 * stash_S]), 0 * stash_S
    kept_S = np.maximum(stash_S, gradient_S)
    return np.stack([kept_S, gradient_S]), stash_S + made_S - kept_S


def _transient(transient_S: np.ndarray, homes: Sequence[int], devices: int) -> np.ndarray:
    """The most that an I of each device holds only while it runs: [devices]. One runs at a time."""
    transient_D = np.zeros(devices)
    np.maximum.at(transient_D, np.array(homes), transient_S)
    return transient_D


@njit(cache=True)
def _dispatch(time_SP, message_S, home_S, kept_2S, room_D, limit_D, microbatches, alternate, backward):
    """The work of `dispatch`: the actions of each device, [devices, most], and their number, [devices].

    An action is the number (4 stage + phase) * microbatches + microbatch. Devices act in the order of time,
    so each knows of the messages on their way to it.
    """
    stages, devices = len(home_S), len(room_D)
    stages_D, first_D, whole_D = np.zeros(devices, np.int64), np.full(devices, -1), np.zeros(devices)
    next_S = np.full(stages, -1)  # the next stage of the same device
    for s in range(stages - 1, -1, -1):
        d = home_S[s]
        next_S[s], first_D[d] = first_D[d], s
        stages_D[d] += 1
        whole_D[d] += kept_2S[0, s]
    longest = 3 * microbatches * stages_D.max()
    there_2SM = np.full((2, stages, microbatches), np.inf)  # when that which F or I reads is there
    there_2SM[0, 0] = 0.0
    done_2S = np.zeros((2, stages), np.int64)
    code_DN, count_D = np.zeros((devices, longest), np.int64), np.zeros(devices, np.int64)
    waiting_DN = np.zeros((devices, longest), np.int64)  # (stage, micro-batch) whose W is to come
    head_D, tail_D = np.zeros(devices, np.int64), np.zeros(devices, np.int64)
    under_way_D, held_D = np.zeros(devices, np.int64), np.zeros(devices)
    end_D, wake_D, last_D = np.zeros(devices), np.full(devices, np.inf), np.full(devices, -1)
    wake_D[home_S[0]] = 0.0
    while wake_D.min() < np.inf:
        d = np.argmin(wake_D)
        now, arrival = wake_D[d], np.inf
        free = under_way_D[d] < limit_D[d] and held_D[d] + whole_D[d] <= room_D[d]
        f_stage, f_microbatch, i_stage = -1, microbatches, -1
        s = first_D[d]
        while s != -1:
            f, i = done_2S[0, s], done_2S[1, s]
            if f < f_microbatch and (free or s != first_D[d]):
                if there_2SM[0, s, f] <= now:
                    f_stage, f_microbatch = s, f
                else:
                    arrival = min(arrival, there_2SM[0, s, f])
            if i < f:
                if there_2SM[1, s, i] <= now:
                    i_stage = s
                else:
                    arrival = min(arrival, there_2SM[1, s, i])
            s = next_S[s]
        if head_D[d] < tail_D[d] and (backward == W_NEXT or f_stage + i_stage == -2):
            phase, step = _W, waiting_DN[d, head_D[d]]
            s, microbatch = step // microbatches, step % microbatches
            head_D[d] += 1
        elif i_stage != -1 and (f_stage == -1 or not (alternate and last_D[d] == _I)):
            phase, s, microbatch = _I, i_stage, done_2S[1, i_stage]
        elif f_stage != -1:
            phase, s, microbatch = _F, f_stage, f_microbatch
        else:
            wake_D[d] = arrival
            continue
        last_D[d] = phase
        if phase == _I and backward == FUSED:
            phase = _B
        code_DN[d, count_D[d]] = (4 * s + phase) * microbatches + microbatch
        count_D[d] += 1
        end = now + time_SP[s, phase]
        end_D[d] = wake_D[d] = end
        if phase == _F:
            done_2S[0, s] += 1
            if s == first_D[d]:
                under_way_D[d] += 1
                held_D[d] += whole_D[d]
            if s == stages - 1:
                there_2SM[1, s, microbatch] = end
        elif phase != _W:
            done_2S[1, s] += 1
            if backward != FUSED:
                waiting_DN[d, tail_D[d]] = s * microbatches + microbatch
                tail_D[d] += 1
        if phase in (_I, _B):
            held_D[d] -= kept_2S[0, s] - kept_2S[1, s]
        elif phase == _W:
            held_D[d] -= kept_2S[1, s]
        if phase in (_W, _B) and s == first_D[d]:
            under_way_D[d] -= 1
        if phase != _W:
            side = 0 if phase == _F else 1
            reader = s + 1 if phase == _F else s - 1
            if 0 <= reader < stages:
                other = home_S[reader]
                hop = min(s, reader)
                arrival = end if other == d else end + message_S[hop]
                there_2SM[side, reader, microbatch] = arrival
                if other != d:
                    wake_D[other] = min(wake_D[other], max(arrival, end_D[other]))
    return code_DN, count_D
