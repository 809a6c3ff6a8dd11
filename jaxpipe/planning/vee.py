"""Schedules with two stages on each device, folded like a V: device d of p has stages d and 2p - 1 - d.

So the first device has the last stage, too, and the backward starts where the forward did. (ZB-V is made
from costs: `zero_bubble.automatic` on `placement`.)
"""

from collections import deque
from collections.abc import Callable

from jaxpipe.planning.plan import Action, Schedule

PERIOD = 6
"""Time from one micro-batch to the next in a building block: F, I and W of two stages, each of time 1."""
EARLY = 2
"""How far an F of the first stage of a device may run ahead of its turn while the pipeline fills."""

Block = Callable[[int, int], tuple[int, int, int, int]]


def placement(devices: int) -> tuple[int, ...]:
    """The device of each stage."""
    return (*range(devices), *reversed(range(devices)))


def v_half(devices: int, microbatches: int) -> Schedule:
    """V-Half of Qi et al. 2024 (arXiv 2405.15362): about half the activation memory of 1F1B.

    At most 2 * ((devices + 2) // 2) pairs of (stage, micro-batch) are in flight (the paper counts
    micro-batches of two half stages: table 1). With F = I = W = 1 the step takes, from 2 * devices
    micro-batches on, 6 * microbatches + 3 * devices - 4 for odd `devices`, 3 less for even ones from 4
    on (1 more than 6 * microbatches for 2): the times that the authors' scheduler reaches.
    """
    return _repeat(_half_block, devices, microbatches, 2 * ((devices + 2) // 2))


def v_min(devices: int, microbatches: int) -> Schedule:
    """V-Min of Qi et al. 2024 (arXiv 2405.15362): about a third of the activation memory of 1F1B.

    At most 2 * ((devices + 4) // 3) pairs of (stage, micro-batch) are in flight (table 1). With F = I = W = 1
    the step takes, from 2 * devices micro-batches on, 6 * microbatches + 4 * devices - 5, or 2 less where 3
    divides `devices`: the times that the authors' scheduler reaches.
    """
    return _repeat(_min_block, devices, microbatches, 2 * ((devices + 4) // 3))


def _half_block(device: int, devices: int) -> tuple[int, int, int, int]:
    """When the first micro-batch runs F of both stages and I of both: hops of 2 down the V, of 1 up."""
    gap = 0 if devices % 2 else 3  # keeps the actions of other micro-batches out of its slots
    back = 3 * devices + gap
    return 2 * device, 3 * devices - 2 - device, back - 1 + 2 * device, back + 3 * devices - 2 - device


def _min_block(device: int, devices: int) -> tuple[int, int, int, int]:
    """As `_half_block`, with hops of 1: each message is used as soon as it can be."""
    gap = 0 if devices % 3 else 2
    back = 2 * devices + gap
    return device, 2 * devices - 1 - device, back + device, back + 2 * devices - 1 - device


def _repeat(block: Block, devices: int, microbatches: int, limit: int) -> Schedule:
    """The building block repeated every PERIOD, on a clock on which F, I and W take 1 each.

    Every device takes its F and I in the order of the repeated block and runs a W where it would wait or
    has `limit` pairs in flight. Two exceptions do what the paper calls squeezing and reordering: before its
    first I a device may take an F of its first stage EARLY, after its last such F whatever is ready.
    """
    starts = [block(device, devices) for device in range(devices)]
    done = [[0] * 4 for _ in range(devices)]  # of F, F, I, I: the first stage forward, the second, and back
    waiting: list[deque[Action]] = [deque() for _ in range(devices)]
    rows: list[list[Action]] = [[] for _ in range(devices)]
    in_flight, ends = [0] * devices, {}

    def ready(device: int, kind: int, now: int) -> bool:
        microbatch, source = done[device][kind], device + (1 if kind % 2 else -1)
        before = [(kind, source)] if 0 <= source < devices else []
        before += [(kind - 1, device)] if kind else []
        fits = kind >= 2 or in_flight[device] < limit
        return fits and all(ends.get((*key, microbatch), now + 1) <= now for key in before)

    def choose(device: int, now: int) -> int | None:
        count = done[device]
        left = [kind for kind in range(4) if count[kind] < microbatches]
        turns = sorted((starts[device][kind] + PERIOD * count[kind], kind) for kind in left)
        for time, kind in turns:
            early = kind == 0 and count[2] == 0 and time <= turns[0][0] + EARLY
            if (kind == turns[0][1] or early or count[0] == microbatches) and ready(device, kind, now):
                return kind
        return None

    now = 0
    while any(len(row) < PERIOD * microbatches for row in rows):
        for device, kind in enumerate([choose(device, now) for device in range(devices)]):
            if kind is not None:
                stage = device if kind in (0, 3) else 2 * devices - 1 - device
                action = Action(stage, "F" if kind < 2 else "I", done[device][kind])
                done[device][kind] += 1
                ends[kind, device, action.microbatch] = now + 1
                in_flight[device] += kind < 2
                if kind >= 2:
                    waiting[device].append(action._replace(phase="W"))
            elif waiting[device]:
                action = waiting[device].popleft()
                in_flight[device] -= 1
            else:
                continue
            rows[device].append(action)
        now += 1
    return tuple(map(tuple, rows))


def dualpipe_v(devices: int, microbatches: int) -> Schedule:
    """DualPipeV of deepseek-ai/DualPipe, where it runs an F and a B at once written as F, then B.

    DualPipe's two directions cut in half: what the second direction did on the other half of the devices,
    the second stages do here. Takes at least 2 * devices micro-batches, has 2 * devices + 1 pairs of (stage,
    micro-batch) in flight, and a bubble of (devices - 1)(F&B + B - 3W), where F&B is the time of an F and a B
    of different micro-batches run at once, both done at its end (README there). Here F hands on its result
    before B begins, so the bubble is at most that with F&B = F + B.

    Raises:
      ValueError: there are fewer than 2 * devices micro-batches.
    """
    if microbatches < 2 * devices:
        least = f"at least {2 * devices} micro-batches"
        raise ValueError(f"DualPipeV on {devices} devices takes {least}, not {microbatches}")
    return tuple(_dualpipe_row(device, devices, microbatches) for device in range(devices))


def _dualpipe_row(device: int, devices: int, microbatches: int) -> tuple[Action, ...]:
    """The actions of a device; 0 and 1 are its first and second stage. W takes the oldest that waits."""
    after, half = devices - 1 - device, device + 1
    steps = ["F0"] * 2 * after + ["F0", "F1"] * half + ["I1", "W", "F1"] * after
    steps += ["F0", "B1", "F1", "B0"] * (microbatches - 2 * devices + half) + ["B1", "F1", "B0"] * after
    # The last backwards of both stages: their first half whole, then W is left for the end.
    steps += [phase + "10"[i % 2] for i, phase in enumerate("B" * half + "I" * half)]
    steps += ["W", "I0"] * after + ["W"] * half
    stages, done, waiting, row = (device, 2 * devices - 1 - device), {}, deque(), []
    for step in steps:
        if step == "W":
            row.append(waiting.popleft())
            continue
        phase, stage = step[0], stages[int(step[1])]
        key = stage, phase == "F"
        action = Action(stage, phase, done.setdefault(key, 0))
        done[key] += 1
        row.append(action)
        if phase == "I":
            waiting.append(action._replace(phase="W"))
    return tuple(row)
