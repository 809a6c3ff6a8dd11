"""Plans made from a partition and a schedule."""

from collections.abc import Collection, Mapping, Sequence

from jaxpipe.costs.table import CostTable
from jaxpipe.planning.partition import balanced, even
from jaxpipe.planning.plan import POLICIES, Plan, Schedule, check
from jaxpipe.planning.schedules import SCHEDULES
from jaxpipe.planning.stages import piece_time

PARTITIONS = ("balanced", "even")
RIVALS = ("gpipe", "1f1b", "1f1b_split", "zb_h1")
"""Schedules that a plan is compared with; GPipe gains next to nothing from I and W apart."""

MOST_PAIRS = 1 << 17
"""Most pairs of device and micro-batch: a schedule of so many takes minutes and 3 GB to be put on ticks."""


def check_sizes(devices: int, microbatches: int) -> None:
    """Raises ValueError for no devices or micro-batches, and for more than can be planned."""
    for what, number in (("devices", devices), ("microbatches", microbatches)):
        if number < 1:
            raise ValueError(f"{what} is {number}; expected at least 1")
    if devices * microbatches > MOST_PAIRS:
        raise ValueError(
            f"{microbatches} micro-batches on {devices} devices are too many to plan; "
            f"expected at most {MOST_PAIRS:,} pairs of device and micro-batch"
        )


def staged_plan(
    name: str,
    costs: CostTable,
    microbatches: int,
    stage_to_device: Sequence[int],
    schedule: Schedule,
    bounds: Sequence[int] | None = None,
    recompute: Sequence[str] | None = None,
    floating_stages: Collection[int] = (),
) -> Plan:
    """A checked plan of a schedule. By default the partition is balanced by time and nothing recomputed.

    floating_stages: stages without parameters whose micro-batches may stand on any device (`plan.check`).

    Raises:
      ValueError: there are more stages than pieces, or the schedule is not of these stages.
    """
    policies = tuple(recompute or ("none",) * len(costs.pieces))
    if bounds is None:
        bounds = balanced([piece_time(*pair) for pair in zip(costs.pieces, policies)], len(stage_to_device))
    plan = Plan(
        name=name,
        devices=len(schedule),
        microbatches=microbatches,
        pieces=tuple(piece.name for piece in costs.pieces),
        stage_bounds=tuple(bounds),
        stage_to_device=tuple(stage_to_device),
        recompute=policies,
        schedule=schedule,
    )
    check(plan, floating_stages)
    return plan


def make_plan(
    costs: CostTable,
    devices: int,
    microbatches: int,
    schedule: str = "1f1b",
    partition: str = "balanced",
    recompute: str | Mapping[str, str] = "none",
) -> Plan:
    """A plan with one stage on each device.

    schedule: a name of `SCHEDULES`.
    partition: "balanced" by time, recompute included, or "even" by number of pieces.
    recompute: one policy for all pieces, or policies by kind of piece (kinds left out: "none").

    Raises:
      ValueError: for an unknown name, with the names that are known, and for more devices than pieces.
    """
    for what, name, known in (("schedule", schedule, SCHEDULES), ("partition", partition, PARTITIONS)):
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}; known: {', '.join(known)}")
    check_sizes(devices, microbatches)
    policies = _policies(costs, recompute)
    bounds = even(len(costs.pieces), devices) if partition == "even" else None
    rows = SCHEDULES[schedule](devices, microbatches)
    name = f"{schedule}-{partition}"
    return staged_plan(name, costs, microbatches, range(devices), rows, bounds, policies)


def rivals(
    costs: CostTable, devices: int, microbatches: int, recompute: str | Mapping[str, str] = "none"
) -> list[Plan]:
    """The plans of all RIVALS and partitions, to compare a plan with. Raises as `make_plan`."""
    return [
        make_plan(costs, devices, microbatches, schedule, partition, recompute)
        for schedule in RIVALS
        for partition in PARTITIONS
    ]


def _policies(costs: CostTable, recompute: str | Mapping[str, str]) -> tuple[str, ...]:
    """The recompute policy of each piece."""
    kinds = sorted({piece.kind for piece in costs.pieces})
    by_kind = dict.fromkeys(kinds, recompute) if isinstance(recompute, str) else recompute
    for kind, policy in by_kind.items():
        if kind not in kinds:
            raise ValueError(f"recompute names unknown kind {kind!r}; known: {', '.join(kinds)}")
        if policy not in POLICIES:
            raise ValueError(f"unknown recompute policy {policy!r} of {kind!r}; known: {', '.join(POLICIES)}")
    return tuple(by_kind.get(piece.kind, "none") for piece in costs.pieces)
