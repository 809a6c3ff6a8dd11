"""A list scheduler for stages on any placement, with I and W apart and a limit on the memory of each device.

It has a few switches; whoever wants a good schedule tries many settings of them (`zero_bubble`, `search`).
How far a device runs ahead follows from an *ideal timetable*: a micro-batch takes `forward` times as long as
it must on its way down the stages, `backward` times on its way up, and the next one follows after the time
that the busiest device needs for one. So it says how many micro-batches each stage needs in flight and, where
a device has several stages, how far each leads the next.

No limit leads to a dead end: an F starts only if all that its micro-batch still needs on the device fits,
too, once those whose F are all done there are gone. So the oldest micro-batch can always go on, as long as
each device has room for one.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from jaxpipe.planning.plan import Action, Schedule

I_FIRST, IN_TURN, BY_TIMETABLE = 0, 1, 2
ORDERS = (I_FIRST, IN_TURN, BY_TIMETABLE)
"""Which of an F and an I that are ready runs: the I, the kind that did not run last, or the one due first."""

SLACK = 1 + 1e-9
"""Sums of memory and of times are not exact."""


class Setting(NamedTuple):
    """Switches of the scheduler.

    forward, backward: how much longer than it must a micro-batch takes down and up the stages; `forward`
      may be infinite, which bounds nothing.
    order: one of ORDERS.
    reserve: whether F leaves room for all later F of its device beside all memory, or only beside what is
      under way.
    patience: a device that could only run a W waits instead if the next message is less than so many W away,
    catch_up: or, if set, as long as it has idled less than the device that idled most.
    defer: an F that is ready yields to an I that comes within so many F.
    """

    forward: float
    backward: float
    order: int = I_FIRST
    reserve: bool = False
    patience: float = 0.5
    catch_up: bool = False
    defer: float = 0.0


class Lines(NamedTuple):
    """What one micro-batch asks of S stages, and where they are.

    time_SP: time of F, I and W.
    change_SP: memory that F, I and W take, or free where it is negative.
    made_S: memory that I takes when it starts; its change is this less what it frees when it ends.
    message_S: time of the message to the next stage, and back; 0 on the same device. The last is not used.
    device_S: device of each stage.
    """

    time_SP: np.ndarray
    change_SP: np.ndarray
    made_S: np.ndarray
    message_S: np.ndarray
    device_S: np.ndarray


class Rows(NamedTuple):
    """A schedule as the scheduler makes it.

    code_DN: the actions of each device, as (3 * stage + phase) * microbatches + microbatch with F, I, W as
      phases 0, 1, 2. count_D: their number. start_D, end_D: of the first action and of the last one; an
      infinite end says that there is no schedule, because the deadline came first or memory is short.
    """

    code_DN: np.ndarray
    count_D: np.ndarray
    start_D: np.ndarray
    end_D: np.ndarray


def list_schedule(
    lines: Lines, limit_D: np.ndarray, microbatches: int, setting: Setting, deadline: float = np.inf
) -> Rows:
    """The schedule of one setting.

    limit_D: the most memory that each device may hold at once.
    deadline: a time after which nothing may start; a schedule that needs longer is given up.
    """
    return Rows(*_list_schedule(*lines, limit_D, microbatches, *setting, deadline))


def least_memory(lines: Lines) -> np.ndarray:
    """By stage, the memory that its device must be allowed for there to be a schedule."""
    room_2S, _ = _room(lines.change_SP, lines.made_S, lines.device_S, _next_on_device(lines.device_S))
    return room_2S[1]


def to_schedule(rows: Rows, microbatches: int) -> Schedule:
    """The actions of all devices."""
    schedule = []
    for codes, count in zip(rows.code_DN.tolist(), rows.count_D):
        steps = (divmod(code, microbatches) for code in codes[:count])
        schedule.append(tuple(Action(step // 3, "FIW"[step % 3], microbatch) for step, microbatch in steps))
    return tuple(schedule)


@njit(cache=True, nogil=True)
def _room(change_SP, made_S, device_S, next_S):
    """Memory that must be free for F of a stage, and what F does to that of micro-batches under way.

    A micro-batch is under way on a device from F of the first of its stages to F of the last.

    Returns an array (2, stages), what must be free of all memory (that of F and the most that an I of the
    device takes) and beside the micro-batches under way (that of F of its device's later stages, too), and
    the change of the memory of micro-batches under way.
    """
    stages = len(device_S)
    room_2S, change_S = np.empty((2, stages)), np.empty(stages)
    for stage in range(stages):
        before, later, grows = 0.0, 0.0, 0.0
        for other in range(stages):
            if device_S[other] == device_S[stage]:
                if other < stage:
                    before += change_SP[other, 0]
                else:
                    later += change_SP[other, 0]
                grows = max(grows, made_S[other])
        room_2S[0, stage] = change_SP[stage, 0] + grows
        room_2S[1, stage] = later + grows
        change_S[stage] = change_SP[stage, 0] if next_S[stage] > stage else -before
    return room_2S, change_S


@njit(cache=True, nogil=True)
def _next_on_device(device_S):
    """The next stage on the same device; the stage itself where it is the last."""
    next_S = np.arange(len(device_S))
    for stage in range(len(device_S)):
        for other in range(stage + 1, len(device_S)):
            if device_S[other] == device_S[stage]:
                next_S[stage] = other
                break
    return next_S


@njit(cache=True, nogil=True)
def _timetable(time_SP, message_S, device_S, devices, forward, backward):
    """When the first micro-batch begins F and I of each stage, and the time from one to the next."""
    stages = len(device_S)
    load_D, due_2S = np.zeros(devices), np.zeros((2, stages))
    for stage in range(stages):
        load_D[device_S[stage]] += time_SP[stage].sum()
    for stage in range(1, stages):
        hop = time_SP[stage - 1, 0] + message_S[stage - 1]
        due_2S[0, stage] = due_2S[0, stage - 1] + min(forward, 1e6) * hop
    due_2S[1, stages - 1] = due_2S[0, stages - 1] + time_SP[stages - 1, 0]
    for stage in range(stages - 2, -1, -1):
        due_2S[1, stage] = due_2S[1, stage + 1] + backward * (time_SP[stage + 1, 1] + message_S[stage])
    return due_2S, load_D.max()


@njit(cache=True, nogil=True)
def _ahead(due_2S, time_SP, next_S, period, microbatches):
    """Most micro-batches from F to I of each stage, and from its F to F of the next stage on its device."""
    stages = len(next_S)
    period *= SLACK  # a trip of k periods takes k micro-batches, however their times are rounded
    in_flight_S, lead_S = np.full(stages, microbatches), np.full(stages, microbatches)
    for stage in range(stages):
        trip = due_2S[1, stage] + time_SP[stage, 1] - due_2S[0, stage]
        lead = due_2S[0, next_S[stage]] - due_2S[0, stage]
        if trip < period * microbatches:
            in_flight_S[stage] = max(1, int(np.ceil(trip / period)))
        if next_S[stage] > stage and lead < period * microbatches:
            lead_S[stage] = max(1, int(np.ceil(lead / period)))
    return in_flight_S, lead_S


@njit(cache=True, nogil=True)
def _list_schedule(
    time_SP, change_SP, made_S, message_S, device_S, limit_D, microbatches,
    forward, backward, order, reserve, patience, catch_up, defer, deadline,
):  # fmt: skip
    """The work of `list_schedule`. Devices act in the order of time: each knows what is on its way to it."""
    stages, devices = len(device_S), len(limit_D)
    next_S = _next_on_device(device_S)
    room_2S, under_way_S = _room(change_SP, made_S, device_S, next_S)
    due_2S, period = _timetable(time_SP, message_S, device_S, devices, forward, backward)
    in_flight_S, lead_S = _ahead(due_2S, time_SP, next_S, period, microbatches)
    longest = 3 * microbatches * np.bincount(device_S, minlength=devices).max()
    there_2SM = np.full((2, stages, microbatches), np.inf)  # when that which F or I reads is there
    there_2SM[0, 0] = 0.0
    done_SP = np.zeros((stages, 3), np.int64)
    code_DN, count_D = np.zeros((devices, longest), np.int64), np.zeros(devices, np.int64)
    queue_DN = np.zeros((devices, longest // 3), np.int64)  # stages in the order of their I, for W
    head_D, tail_D = np.zeros(devices, np.int64), np.zeros(devices, np.int64)
    start_D, end_D, wake_D = np.full(devices, np.inf), np.zeros(devices), np.full(devices, np.inf)
    wake_D[device_S[0]] = 0.0
    first_D = np.zeros(devices, np.int64)
    for stage in range(stages - 1, -1, -1):
        first_D[device_S[stage]] = stage
        if room_2S[1, stage] > limit_D[device_S[stage]] * SLACK:
            end_D[:] = np.inf
            return code_DN, count_D, start_D, end_D
    idle_D, last_D = np.zeros(devices), np.full(devices, 2)
    memory_D, under_way_D = np.zeros(devices), np.zeros(devices)
    while True:
        device = np.argmin(wake_D)
        now = wake_D[device]
        if now == np.inf:
            break
        if now > deadline:
            end_D[:] = np.inf
            break
        limit = limit_D[device] * SLACK
        free = limit - memory_D[device]
        spare = free if reserve else limit - under_way_D[device]
        w_waits = head_D[device] < tail_D[device]
        phase, stage, full, next_f, next_i = _choose(
            now, first_D[device], free, spare, w_waits, last_D[device], order, period,
            done_SP, there_2SM, made_S, room_2S, next_S, due_2S, in_flight_S, lead_S,
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
        code_DN[device, count_D[device]] = (3 * stage + phase) * microbatches + microbatch
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
    return code_DN, count_D, start_D, end_D


@njit(cache=True, nogil=True)
def _choose(
    now, first, free, spare, w_waits, last, order, period,
    done_SP, there_2SM, made_S, room_2S, next_S, due_2S, in_flight_S, lead_S,
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
            fits = made_S[s] <= free
            there = there_2SM[1, s, backwards]
            rank = _rank(1, s, backwards, order, last, due_2S, period)
            if there > now:
                next_i = min(next_i, there) if fits or w_waits else next_i
            elif not fits:
                full = True
            elif rank < least:
                least, phase, stage = rank, 1, s
    return phase, stage, full, next_f, next_i


@njit(cache=True, nogil=True)
def _rank(phase, stage, microbatch, order, last, due_2S, period):
    """What runs first among the F and I that are ready: the least. Of two stages the later one."""
    if order == BY_TIMETABLE:
        return due_2S[phase, stage] + microbatch * period
    second = phase == 0 if order == I_FIRST else phase == last
    return 2.0 * second - stage / due_2S.shape[1]
