"""Schedules made from costs under a memory limit, with I and W apart.

The aim is that of the automatic scheduler of Qi et al. 2023 (arXiv 2401.10241, section 3): a greedy list
scheduler with a few switches, many settings tried, the best kept. This one takes any placement, so it makes
ZB-V (section 6 there), too. How far a device runs ahead follows from an *ideal timetable*: a micro-batch
takes `forward` times as long as it must on its way down the stages, `backward` times on its way up, and the
next one follows after the time that the busiest device needs for one. So it says how many micro-batches each
stage needs in flight and, where a device has several stages, how far each leads the next.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numba import njit

from jaxpipe.costs.table import Link
from jaxpipe.planning.plan import Action, Schedule
from jaxpipe.planning.stages import StageCost


class Work(NamedTuple):
    """What one micro-batch asks of a stage.

    F, I, W: time of each phase.
    message: time that the output takes to the next stage, and its gradient back; 0 on the same device.
    held: memory from the start of F to the start of I.
    kept: memory from the start of I to the end of W. Less than `held` where I frees part of what F left.
    """

    F: float
    I: float
    W: float
    message: float = 0.0
    held: float = 1.0
    kept: float = 1.0


class Found(NamedTuple):
    """A schedule, the end of its last action, and the longest from first start to last end on a device."""

    schedule: Schedule
    makespan: float
    span: float


FORWARD = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 5.5, 6.0, np.inf)
BACKWARD = (1.0, 1.5, 2.0, 3.0)
I_FIRST, IN_TURN, BY_TIMETABLE = 0, 1, 2
ORDERS = (I_FIRST, IN_TURN, BY_TIMETABLE)
"""Which of an F and an I that are ready runs: the I, the kind that did not run last, or the one due first."""
RESERVE = (False, True)
"""Whether F leaves room for all later F of its device beside all memory, or only beside what is under way."""
PATIENCE = (0.0, 0.5, 1.0)
"""A device that could only run a W waits instead if the next message is less than so many W away,"""
CATCH_UP = (False, True)
"""or, if set, as long as it has idled less than the device that idled most."""
DEFER = (0.0, 0.5, 1.0)
"""An F that is ready yields to an I that comes within so many F."""
FINE = (0.87, 0.93, 1.0, 1.07, 1.15)
"""Factors on `forward` and `backward` of the best settings."""
KEPT = 12
"""Settings that go on from one stage of the search to the next."""


def works(stages: Sequence[StageCost], stage_to_device: Sequence[int], link: Link) -> tuple[Work, ...]:
    """The work of stages, with memory in bytes.

    A stage some of whose pieces leave W more than they stash, and others less, holds more while I runs
    (`StageCost.made_bytes`) than `Work` can say.
    """
    found = []
    for stage, (cost, device) in enumerate(zip(stages, stage_to_device)):
        away = stage + 1 < len(stages) and stage_to_device[stage + 1] != device
        message = link.time(cost.output_bytes) if away else 0.0
        found.append(Work(cost.F, cost.I, cost.W, message, cost.stash_bytes, cost.grad_stash_bytes))
    return tuple(found)


def automatic(
    stages: Sequence[Work],
    stage_to_device: Sequence[int],
    microbatches: int,
    limits: Sequence[float],
    goal: str = "makespan",
) -> Found:
    """The best schedule found in which no device d ever holds more than limits[d].

    Where `held` and `kept` are 1 the limit is a number of (stage, micro-batch) pairs in flight. There is a
    schedule whenever each device has room for one micro-batch: an F starts only if all that its micro-batch
    still needs on the device fits, too, once those whose F are all done there are gone. So the oldest
    micro-batch can always go on.

    goal: "makespan", or "span", which the paper measures (its devices start a step when they can).

    Raises:
      ValueError: a device has no room for one micro-batch; the goal is unknown.
    """
    if goal not in ("makespan", "span"):
        raise ValueError(f"unknown goal {goal!r}; known: makespan, span")
    device_S = np.array(stage_to_device, np.int64)
    time_SP = np.array([(work.F, work.I, work.W) for work in stages], np.float64)
    change_SP = np.array([(work.held, work.kept - work.held, -work.kept) for work in stages], np.float64)
    message_S = np.array([work.message for work in stages], np.float64)
    limit_D = np.array(limits, np.float64)
    next_S = _next_on_device(device_S)
    room_2S, under_way_S = _room(change_SP, device_S, next_S)
    limit_D *= 1 + 1e-9  # Sums of memory are not exact.
    for stage, device in enumerate(stage_to_device):
        if room_2S[1, stage] > limit_D[device]:
            raise ValueError(
                f"device {device} may hold {limits[device]:g}; a micro-batch needs {room_2S[1, stage]:g}"
            )

    def run(forward, backward, *switches):
        due_2S, period = _timetable(time_SP, message_S, device_S, forward, backward)
        ahead = _ahead(due_2S, time_SP, next_S, period, microbatches)
        stage_data = time_SP, change_SP, message_S, room_2S, under_way_S, device_S, next_S, due_2S, *ahead
        return _greedy(*stage_data, limit_D, microbatches, period, *switches)

    scores = {}

    def score(setting):
        if setting not in scores:
            _, _, start_D, end_D = run(*setting)
            makespan, span = end_D.max(), (end_D - start_D).max()
            scores[setting] = (makespan, span) if goal == "makespan" else (span, makespan)
        return scores[setting]

    def best(settings):
        distinct = {score(setting): setting for setting in settings}
        return [distinct[key] for key in sorted(distinct)[:KEPT]]

    reserve = RESERVE if len(stages) > len(set(stage_to_device)) else (False,)
    found = best(product(FORWARD, BACKWARD, ORDERS, reserve, (PATIENCE[1],), (False,), (0.0,)))
    found = best((*s[:4], *switches) for s in found for switches in product(PATIENCE, CATCH_UP, DEFER))
    found = best((s[0] * down, s[1] * up, *s[2:]) for s in found for down in FINE for up in FINE)
    rows_DN, count_D, start_D, end_D = run(*found[0])
    schedule = _schedule(rows_DN, count_D, microbatches)
    return Found(schedule, float(end_D.max()), float((end_D - start_D).max()))


def _room(change_SP, device_S, next_S):
    """Memory that must be free for F of a stage, and what F does to that of micro-batches under way.

    A micro-batch is under way on a device from F of the first of its stages to F of the last.

    Returns an array (2, stages), what must be free of all memory (that of F and the most that an I of the
    device adds) and beside the micro-batches under way (that of F of its device's later stages, too), and
    the change of the memory of micro-batches under way.
    """
    room, change = [], []
    for stage, device in enumerate(device_S):
        here = device_S == device
        held, grows = change_SP[:, 0] * here, change_SP[here, 1].max(initial=0.0)
        room.append((held[stage] + grows, held[stage:].sum() + grows))
        change.append(held[stage] if next_S[stage] > stage else -held[:stage].sum())
    return np.array(room).T.copy(), np.array(change)


def _next_on_device(device_S):
    """The next stage on the same device; the stage itself where it is the last."""
    later = [np.flatnonzero(device_S[stage + 1 :] == device) for stage, device in enumerate(device_S)]
    return np.array([stage + 1 + found[0] if len(found) else stage for stage, found in enumerate(later)])


def _timetable(time_SP, message_S, device_S, forward, backward):
    """When the first micro-batch begins F and I of each stage, and the time from one to the next."""
    period = max(time_SP[device_S == device].sum() for device in set(device_S.tolist()))
    hops = min(forward, 1e6) * (time_SP[:-1, 0] + message_S[:-1])
    down = np.concatenate([[0.0], np.cumsum(hops)])
    hops = backward * (time_SP[1:, 1] + message_S[:-1])
    up = np.concatenate([np.cumsum(hops[::-1])[::-1], [0.0]])
    return np.stack([down, down[-1] + time_SP[-1, 0] + up]), period


def _ahead(due_2S, time_SP, next_S, period, microbatches):
    """Most micro-batches from F to I of each stage, and from its F to F of the next stage on its device."""
    trip = due_2S[1] + time_SP[:, 1] - due_2S[0]
    lead = np.where(next_S > np.arange(len(next_S)), due_2S[0, next_S] - due_2S[0], np.inf)
    with np.errstate(invalid="ignore", divide="ignore"):
        return tuple(np.clip(np.nan_to_num(np.ceil(s / period)), 1, microbatches) for s in (trip, lead))


@njit(cache=True)
def _greedy(
    time_SP, change_SP, message_S, room_2S, under_way_S, device_S, next_S, due_2S, in_flight_S,
    lead_S, limit_D, microbatches, period, order, reserve, patience, catch_up, defer,
):  # fmt: skip
    """One schedule. Devices act in the order of time, so each knows of messages on their way to it.

    Returns the actions of each device, as (3 * stage + phase) * microbatches + microbatch, their number, the
    start of the first and the end of the last.
    """
    stages, devices = len(device_S), len(limit_D)
    longest = 3 * microbatches * np.bincount(device_S, minlength=devices).max()
    there_2SM = np.full((2, stages, microbatches), np.inf)  # when that which F or I reads is there
    there_2SM[0, 0] = 0.0
    done_SP = np.zeros((stages, 3), np.int64)
    rows_DN, count_D = np.zeros((devices, longest), np.int64), np.zeros(devices, np.int64)
    queue_DN = np.zeros((devices, longest), np.int64)  # stages in the order of their I, for W
    head_D, tail_D = np.zeros(devices, np.int64), np.zeros(devices, np.int64)
    start_D, end_D, wake_D = np.full(devices, np.inf), np.zeros(devices), np.full(devices, np.inf)
    wake_D[device_S[0]] = 0.0
    first_D = np.zeros(devices, np.int64)
    for stage in range(stages - 1, -1, -1):
        first_D[device_S[stage]] = stage
    idle_D, last_D = np.zeros(devices), np.full(devices, 2)
    memory_D, under_way_D = np.zeros(devices), np.zeros(devices)
    while wake_D.min() < np.inf:
        device = np.argmin(wake_D)
        now, free = wake_D[device], limit_D[device] - memory_D[device]
        spare = free if reserve else limit_D[device] - under_way_D[device]
        w_waits = head_D[device] < tail_D[device]
        phase, stage, full, next_f, next_i = _choose(
            now, first_D[device], free, spare, w_waits, last_D[device], order, period,
            done_SP, there_2SM, change_SP, room_2S, next_S, due_2S, in_flight_S, lead_S,
        )  # fmt: skip
        arrival = min(next_f, next_i)
        if phase == 0 and next_i < now + defer * time_SP[stage, 0]:
            phase, arrival = -1, next_i
        if phase < 0 and w_waits:
            time = time_SP[queue_DN[device, head_D[device]], 2]
            slack = patience * time
            if catch_up:
                slack = max(slack, idle_D.max() - idle_D[device])
            if full or arrival - now >= min(time, slack + 1e-9 * period):
                phase, stage = 2, queue_DN[device, head_D[device]]
                head_D[device] += 1
        if phase < 0:
            wake_D[device] = arrival
            continue
        microbatch = done_SP[stage, phase]
        done_SP[stage, phase] += 1
        rows_DN[device, count_D[device]] = (3 * stage + phase) * microbatches + microbatch
        if count_D[device] == 0:
            start_D[device] = now
        else:
            idle_D[device] += now - end_D[device]
        count_D[device] += 1
        last_D[device] = phase
        memory_D[device] += change_SP[stage, phase]
        end = now + time_SP[stage, phase]
        end_D[device] = wake_D[device] = end
        if phase == 2:
            continue
        if phase == 1:
            queue_DN[device, tail_D[device]] = stage
            tail_D[device] += 1
        else:
            under_way_D[device] += under_way_S[stage]
            if stage == stages - 1:
                there_2SM[1, stage, microbatch] = end
        reader = stage + 1 if phase == 0 else stage - 1
        if 0 <= reader < stages:
            arrival = end + message_S[min(stage, reader)]
            there_2SM[phase, reader, microbatch] = arrival
            other = device_S[reader]
            if other != device:
                wake_D[other] = min(wake_D[other], max(arrival, end_D[other]))
    return rows_DN, count_D, start_D, end_D


@njit(cache=True)
def _choose(
    now, first, free, spare, w_waits, last, order, period,
    done_SP, there_2SM, change_SP, room_2S, next_S, due_2S, in_flight_S, lead_S,
):  # fmt: skip
    """The F or I that a device runs now.

    first: its first stage. free: its free memory; spare: what an F must leave for all later F. w_waits:
    whether it has a W to free memory with. last: the phase that it ran last.

    Returns its phase and stage, or -1 for both; whether one is ready but does not fit; when the next F and
    the next I get what they read.
    """
    phase, stage, least, full = -1, -1, np.inf, False
    next_f, next_i = np.inf, np.inf
    s, after = -1, first
    while after != s:
        s, after = after, next_S[after]
        forwards, backwards = done_SP[s, 0], done_SP[s, 1]
        leads = after > s and forwards - done_SP[after, 0] >= lead_S[s]
        if forwards < there_2SM.shape[2] and forwards - backwards < in_flight_S[s] and not leads:
            # The last stage of a device takes nothing that a micro-batch under way will need.
            fits = room_2S[0, s] <= free and (after == s or room_2S[1, s] <= spare)
            there = there_2SM[0, s, forwards]
            rank = _rank(0, s, forwards, order, last, due_2S, period)
            if there > now:
                next_f = min(next_f, there) if fits or w_waits else next_f
            elif not fits:
                full = True
            elif rank < least:
                least, phase, stage = rank, 0, s
        if backwards < forwards:
            fits = change_SP[s, 1] <= free
            there = there_2SM[1, s, backwards]
            rank = _rank(1, s, backwards, order, last, due_2S, period)
            if there > now:
                next_i = min(next_i, there) if fits or w_waits else next_i
            elif not fits:
                full = True
            elif rank < least:
                least, phase, stage = rank, 1, s
    return phase, stage, full, next_f, next_i


@njit(cache=True)
def _rank(phase, stage, microbatch, order, last, due_2S, period):
    """What runs first among the F and I that are ready: the least. Of two stages the later one."""
    if order == BY_TIMETABLE:
        return due_2S[phase, stage] + microbatch * period
    second = phase == 0 if order == I_FIRST else phase == last
    return 2.0 * second - stage / due_2S.shape[1]


def _schedule(rows_DN, count_D, microbatches: int) -> Schedule:
    rows = []
    for codes, count in zip(rows_DN.tolist(), count_D):
        steps = (divmod(code, microbatches) for code in codes[:count])
        rows.append(tuple(Action(step // 3, "FIW"[step % 3], microbatch) for step, microbatch in steps))
    return tuple(rows)
