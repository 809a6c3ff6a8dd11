"""Schedules with several stages, or chunks, on each device.

In the formulas p is the number of devices, m of micro-batches, v of stages on a device; F and B are the
times of one equal stage, messages take none, and the bubble is what a step takes beyond m v (F + B).
"""

from jaxpipe.planning.plan import Action, Schedule
from jaxpipe.planning.schedules import alternate


def interleaved_1f1b(devices: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B over `chunks` stages a device, stage s on device s mod p, in groups of p micro-batches.

    The interleaved schedule of Narayanan et al. 2021 (arXiv 2104.04473, section 2.2.2): a device takes a
    group through its first stage, then through the next. The warm-up of device d is
    2 (p - 1 - d) + (v - 1) p forwards. Bubble (p - 1)(F + B), a v-th of that of 1F1B over the same model;
    device d keeps one (stage, micro-batch) pair more than its warm-up in flight, and never more than m v.

    Raises:
      ValueError: when the micro-batches are no multiple of the devices.
    """
    if microbatches % devices:
        raise ValueError(
            f"{microbatches} micro-batches cannot be interleaved; expected a multiple of {devices} devices"
        )
    rows = []
    for device in range(devices):
        orders = (
            [
                Action(chunk * devices + device, phase, first + i)
                for first in range(0, microbatches, devices)
                for chunk in order
                for i in range(devices)
            ]
            for phase, order in (("F", range(chunks)), ("B", range(chunks)[::-1]))
        )
        rows.append(alternate(*orders, 2 * (devices - 1 - device) + (chunks - 1) * devices))
    return tuple(rows)


def breadth_first(devices: int, microbatches: int, chunks: int = 2) -> Schedule:
    """All micro-batches through one stage after the other, stage s on device s mod p; then all the way back.

    The looped schedule of Lamy-Poirier 2023 (arXiv 2211.05953), in the order that PyTorch's LoopedBFS gives
    it: the backward is the forward reversed, last micro-batch first. A device works on one stage at a time,
    so with sharded weights each is gathered only once. Bubble (p - 1)(F + B), and (v - 1)(p - m)(F + B) more
    where m is less than p; all m v (stage, micro-batch) pairs are in flight on every device.
    """
    rows = []
    for device in range(devices):
        pairs = [(chunk * devices + device, i) for chunk in range(chunks) for i in range(microbatches)]
        forwards = tuple(Action(stage, "F", i) for stage, i in pairs)
        rows.append(forwards + tuple(Action(stage, "B", i) for stage, i in reversed(pairs)))
    return tuple(rows)


def hanayo(devices: int, microbatches: int, waves: int = 2) -> Schedule:
    """Waves: stages go from the first device to the last and back, `waves` times.

    The placement of Liu et al. 2023 (Hanayo, arXiv 2308.15762): v = 2 waves, no message at a turn; one wave
    looks like a V, two like a W. Here F of stage s and micro-batch i stands on slot s + 2i, and B on its
    mirror image: on the way forth a micro-batch meets a device on slots of one parity, on the way back of
    the other, so up to p of them, the unit of the paper, never meet each other. Further units follow
    without an idle slot between.

    Bubble for m = k p: 2 (p - 1)(max(F, B) + (k - 1)|B - F|), as slots are not equal in truth. One unit with
    B = 2F idles for 4 (p - 1) F, which is (2p - 2)/waves forwards of a whole device. Device d keeps
    p (v - 1) + d + 1 (stage, micro-batch) pairs in flight, however many units there are.
    """
    stages = 2 * waves * devices
    rows = []
    for device in range(devices):
        slots = []
        for turn in range(0, stages, devices):
            stage = turn + (device if turn // devices % 2 == 0 else devices - 1 - device)
            for i in range(microbatches):
                unit, place = divmod(i, devices)
                enter = 2 * stages * unit + 2 * place
                slots.append((enter + stage, Action(stage, "F", i)))
                slots.append((enter + 2 * stages - 1 - stage, Action(stage, "B", i)))
        rows.append(tuple(action for _, action in sorted(slots)))
    return tuple(rows)
