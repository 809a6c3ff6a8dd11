"""Schedules with one stage on each device.

`split_backward` takes the backward, B, of any schedule apart into its input gradient I and its weight
gradient W, so that I can hand its gradient on before W runs.
"""

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


def zero_bubble_h1(stages: int, microbatches: int) -> Schedule:
    """1F1B with I and W apart and W of stage s put off by s micro-batches.

    The handcrafted ZB-H1 of Qi et al. 2023 (arXiv 2401.10241, section 2.1). Leaving W out at first, late
    stages start their I earlier; what they put off fills the end. Every stage keeps at most `stages`
    micro-batches between F and W, as many as the first stage of 1F1B.
    """
    rows = []
    for stage, row in enumerate(one_f_one_b(stages, microbatches)):
        actions = []
        for action in row:
            if action.phase == "F":
                actions.append(action)
                continue
            actions.append(action._replace(phase="I"))
            if action.microbatch >= stage:
                actions.append(Action(stage, "W", action.microbatch - stage))
        late = range(max(0, microbatches - stage), microbatches)
        rows.append((*actions, *(Action(stage, "W", i) for i in late)))
    return tuple(rows)


def split_backward(schedule: Schedule) -> Schedule:
    """The schedule with every B replaced by I and, right after it, W."""
    return tuple(
        tuple(
            part
            for action in row
            for part in ([action._replace(phase=p) for p in "IW"] if action.phase == "B" else [action])
        )
        for row in schedule
    )


def fuse_backward(schedule: Schedule) -> Schedule:
    """The schedule with every I that its own W follows right away replaced, with the W, by B."""
    rows = []
    for row in schedule:
        fused = []
        for action in row:
            if action.phase == "W" and fused and fused[-1] == action._replace(phase="I"):
                fused[-1] = action._replace(phase="B")
            else:
                fused.append(action)
        rows.append(tuple(fused))
    return tuple(rows)


def gpipe_split(stages: int, microbatches: int) -> Schedule:
    """`gpipe` with every B split into I and W."""
    return split_backward(gpipe(stages, microbatches))


def one_f_one_b_split(stages: int, microbatches: int) -> Schedule:
    """`one_f_one_b` with every B split into I and W."""
    return split_backward(one_f_one_b(stages, microbatches))


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "gpipe_split": gpipe_split,
    "1f1b": one_f_one_b,
    "1f1b_split": one_f_one_b_split,
    "zb_h1": zero_bubble_h1,
}
"""Schedule of a number of stages (one a device) and of micro-batches, by name."""
