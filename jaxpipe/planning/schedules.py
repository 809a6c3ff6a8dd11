"""Schedules with one stage on each device and the whole backward in one action, B."""

from collections.abc import Callable

from jaxpipe.planning.plan import Action, Schedule


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, both in the order of the micro-batches.

    Huang et al. 2019 (arXiv 1811.06965, section 2.3). Every stage keeps all micro-batches in flight.
    """
    return tuple(
        tuple(Action(stage, phase, microbatch) for phase in "FB" for microbatch in range(microbatches))
        for stage in range(stages)
    )


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """One forward, one backward in turn, after a warm-up of stages - 1 - s forwards on stage s.

    The non-interleaved schedule of Narayanan et al. 2021 (arXiv 2104.04473, section 2.2.1): stage s
    keeps at most stages - s micro-batches in flight.
    """
    rows = []
    for stage in range(stages):
        warmup = min(stages - 1 - stage, microbatches)
        row = [Action(stage, "F", i) for i in range(warmup)]
        for i in range(warmup, microbatches):
            row += [Action(stage, "F", i), Action(stage, "B", i - warmup)]
        row += [Action(stage, "B", i) for i in range(microbatches - warmup, microbatches)]
        rows.append(tuple(row))
    return tuple(rows)


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}
"""Schedule of a number of stages (one a device) and of micro-batches, by name."""
