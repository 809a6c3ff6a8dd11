"""Schedules made from costs under a memory limit, with I and W apart.

The aim is that of the automatic scheduler of Qi et al. 2023 (arXiv 2401.10241, section 3): a greedy list
scheduler with a few switches, many settings tried, the best kept. This one takes any placement, so it makes
ZB-V (section 6 there), too.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from jaxpipe.costs.table import Link
from jaxpipe.planning.list_scheduler import (
    ORDERS,
    SLACK,
    Lines,
    Setting,
    least_memory,
    list_schedule,
    to_schedule,
)
from jaxpipe.planning.plan import Schedule
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
RESERVE = (False, True)
PATIENCE = (0.0, 0.5, 1.0)
CATCH_UP = (False, True)
DEFER = (0.0, 0.5, 1.0)
"""Values that are tried of the fields of `Setting`."""
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
    schedule whenever each device has room for one micro-batch.

    goal: "makespan", or "span", which the paper measures (its devices start a step when they can).

    Raises:
      ValueError: a device has no room for one micro-batch; the goal is unknown.
    """
    if goal not in ("makespan", "span"):
        raise ValueError(f"unknown goal {goal!r}; known: makespan, span")
    lines = _lines(stages, stage_to_device)
    limit_D = np.array(limits, np.float64)
    for device, needed in zip(stage_to_device, least_memory(lines)):
        if needed > limits[device] * SLACK:
            raise ValueError(f"device {device} may hold {limits[device]:g}; a micro-batch needs {needed:g}")
    scores = {}

    def score(setting):
        if setting not in scores:
            rows = list_schedule(lines, limit_D, microbatches, setting)
            makespan, span = rows.end_D.max(), (rows.end_D - rows.start_D).max()
            scores[setting] = (makespan, span) if goal == "makespan" else (span, makespan)
        return scores[setting]

    def best(settings):
        distinct = {score(setting): setting for setting in settings}
        return [distinct[key] for key in sorted(distinct)[:KEPT]]

    reserve = RESERVE if len(stages) > len(set(stage_to_device)) else (False,)
    found = best(Setting(*values) for values in product(FORWARD, BACKWARD, ORDERS, reserve))
    found = best(Setting(*s[:4], *more) for s in found for more in product(PATIENCE, CATCH_UP, DEFER))
    found = best(Setting(s[0] * down, s[1] * up, *s[2:]) for s in found for down in FINE for up in FINE)
    rows = list_schedule(lines, limit_D, microbatches, found[0])
    span = float((rows.end_D - rows.start_D).max())
    return Found(to_schedule(rows, microbatches), float(rows.end_D.max()), span)


def _lines(stages: Sequence[Work], stage_to_device: Sequence[int]) -> Lines:
    return Lines(
        time_SP=np.array([(work.F, work.I, work.W) for work in stages], np.float64),
        change_SP=np.array([(work.held, work.kept - work.held, -work.kept) for work in stages], np.float64),
        made_S=np.array([max(0.0, work.kept - work.held) for work in stages], np.float64),
        message_S=np.array([work.message for work in stages], np.float64),
        device_S=np.array(stage_to_device, np.int64),
    )
