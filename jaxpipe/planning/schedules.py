"""Schedules with one stage on each device.

`split_backward` takes the backward, B, of any schedule apart into its input gradient I and its weight
gradient W, so that I can hand its gradient on before W runs.

In the formulas p is the number of devices, m of micro-batches; F, I, W and B = I + W are the times of one
equal stage, messages take none, and the bubble is what a step takes beyond m (F + B).
"""

from collections.abc import Callable, Sequence

from jaxpipe.planning.plan import Action, Schedule


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, both in the order of the micro-batches.

    Huang et al. 2019 (arXiv 1811.06965, section 2.3). Bubble (p - 1)(F + B); every stage keeps all m
    micro-batches in flight.
    """
    return tuple(
        tuple(Action(stage, phase, microbatch) for phase in "FB" for microbatch in range(microbatches))
        for stage in range(stages)
    )


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """One forward, one backward in turn, after a warm-up of stages - 1 - s forwards on stage s.

    The non-interleaved schedule of Narayanan et al. 2021 (arXiv 2104.04473, section 2.2.1). Bubble
    (p - 1)(F + B); stage s keeps at most p - s micro-batches in flight.
    """
    return tuple(
        alternate(
            [Action(stage, "F", i) for i in range(microbatches)],
            [Action(stage, "B", i) for i in range(microbatches)],
            stages - 1 - stage,
        )
        for stage in range(stages)
    )


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> tuple[Action, ...]:
    """A row of `warmup` forwards (or all), then one forward and one backward in turn, then backwards."""
    warmup = min(warmup, len(forwards))
    row = list(forwards[:warmup])
    for pair in zip(forwards[warmup:], backwards):
        row += pair
    return (*row, *backwards[len(forwards) - warmup :])


def zero_bubble_h1(stages: int, microbatches: int) -> Schedule:
    """1F1B with I and W apart and W of stage s put off by s micro-batches.

    The handcrafted ZB-H1 of Qi et al. 2023 (arXiv 2401.10241, section 2.1). Leaving W out at first, late
    stages start their I earlier; what they put off fills the end. Bubble (p - 1)(F + I - W) when m is at
    least p and W longer than neither F nor I. Every stage keeps at most p micro-batches between F and W,
    as many as the first stage of 1F1B.
    """
    return _put_off(stages, microbatches, 1)


def zero_bubble_h2(stages: int, microbatches: int) -> Schedule:
    """ZB-H1 with twice the warm-up on every stage, and W put off by twice as many micro-batches.

    The handcrafted ZB-H2 of Qi et al. 2023 (arXiv 2401.10241, section 2.2). Bubble of a device, from its
    first start to its last end, at most (p - 1)(F + I - 2W) when m is at least 2p - 1 and W longer than
    neither F nor I; none with equal times. The whole step, as devices start F apart, is
    (p - 1) max(F, F + I - 2W) longer than its work. Every stage keeps at most 2p - 1 micro-batches between
    F and W.
    """
    return _put_off(stages, microbatches, 2)


def _put_off(stages: int, microbatches: int, step: int) -> Schedule:
    """Stage s runs step (stages - 1 - s) forwards first, and W `step` s micro-batches after I."""
    rows = []
    for stage in range(stages):
        late = step * stage
        row = alternate(
            [Action(stage, "F", i) for i in range(microbatches)],
            [Action(stage, "I", i) for i in range(microbatches)],
            step * (stages - 1 - stage),
        )
        actions = []
        for action in row:
            actions.append(action)
            if action.phase == "I" and action.microbatch >= late:
                actions.append(Action(stage, "W", action.microbatch - late))
        left = range(max(0, microbatches - late), microbatches)
        rows.append((*actions, *(Action(stage, "W", i) for i in left)))
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
    """`gpipe` with every B split into I and W. Bubble (p - 1)(F + I): gradients do not wait for W."""
    return split_backward(gpipe(stages, microbatches))


def one_f_one_b_split(stages: int, microbatches: int) -> Schedule:
    """`one_f_one_b` with every B split into I and W. Bubble (p - 1)(F + I): gradients do not wait for W."""
    return split_backward(one_f_one_b(stages, microbatches))


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "gpipe_split": gpipe_split,
    "1f1b": one_f_one_b,
    "1f1b_split": one_f_one_b_split,
    "zb_h1": zero_bubble_h1,
    "zb_h2": zero_bubble_h2,
}
"""Schedule of a number of stages (one a device) and of micro-batches, by name."""
