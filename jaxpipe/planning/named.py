"""Plans by the name of their schedule."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxpipe.costs.table import CostTable
from jaxpipe.planning import adaptive, helix, octopipe, vee, zero_bubble
from jaxpipe.planning.build import check_sizes, staged_plan
from jaxpipe.planning.interleaved import breadth_first, hanayo, interleaved_1f1b
from jaxpipe.planning.layers import even_layers
from jaxpipe.planning.partition import balanced, check_counts
from jaxpipe.planning.plan import Plan, Schedule
from jaxpipe.planning.schedules import SCHEDULES, one_f_one_b
from jaxpipe.planning.stages import costs_of_stages


class Named(NamedTuple):
    """How the plan of a name is made, and for which numbers of micro-batches.

    make: (costs, devices, micro-batches) -> plan.
    step, least: from the number of devices; micro-batches must be a multiple of `step` and at least `least`.
    """

    make: Callable[[CostTable, int, int], Plan]
    step: Callable[[int], int] = lambda devices: 1
    least: Callable[[int], int] = lambda devices: 1


def _by_rule(
    name: str,
    rule: Callable[[int, int], Schedule],
    step: Callable[[int], int] = lambda devices: 1,
    least: Callable[[int], int] = lambda devices: 1,
) -> Named:
    """A schedule made of (devices, micro-batches); each stage is on the device where its actions stand."""

    def make(costs: CostTable, devices: int, microbatches: int) -> Plan:
        schedule = rule(devices, microbatches)
        home = {action.stage: device for device, row in enumerate(schedule) for action in row}
        _check_pieces(name, costs, devices, len(home))
        return staged_plan(name, costs, microbatches, [home[stage] for stage in sorted(home)], schedule)

    return Named(make, step, least)


def _check_pieces(name: str, costs: CostTable, devices: int, stages: int) -> None:
    where = f"stages of schedule {name!r} on {devices} devices"
    check_counts(len(costs.pieces), stages, where=where)


def _s_1f1b(costs: CostTable, devices: int, microbatches: int) -> Plan:
    """1F1B on layers split evenly by count, the embedding with the first and the head with the last."""
    schedule, bounds = one_f_one_b(devices, microbatches), even_layers(costs.pieces, devices)
    return staged_plan("s_1f1b", costs, microbatches, range(devices), schedule, bounds)


def _helix(name: str, fold: int, recompute: bool) -> Named:
    """HelixPipe with units of `fold` micro-batches, with or without recompute without attention."""

    def make(costs: CostTable, devices: int, microbatches: int) -> Plan:
        layers, bounds, homes, floating = helix.layout(costs, devices)
        schedule = helix.helix(layers, devices, microbatches, fold)
        policies = helix.recompute_without_attention(costs) if recompute else None
        return staged_plan(name, costs, microbatches, homes, schedule, bounds, policies, floating)

    return Named(make, step=lambda devices: fold * devices)


def _tuned(name: str, tune: Callable[[CostTable, int, int], adaptive.Tuned], **counts) -> Named:
    """1F1B on a partition and a recompute policy that are tuned together."""

    def make(costs: CostTable, devices: int, microbatches: int) -> Plan:
        bounds, recompute, _ = tune(costs, devices, microbatches)
        schedule = one_f_one_b(devices, microbatches)
        return staged_plan(name, costs, microbatches, range(devices), schedule, bounds, recompute)

    return Named(make, **counts)


def _automatic(name: str, placement: Callable[[int], Sequence[int]], limit: Callable[[int], int]) -> Named:
    """The schedule that the automatic scheduler makes of the costs on a placement of the stages.

    limit: from the number of devices, the most (stage, micro-batch) pairs in flight on each.
    """

    def make(costs: CostTable, devices: int, microbatches: int) -> Plan:
        homes = tuple(placement(devices))
        _check_pieces(name, costs, devices, len(homes))
        bounds = balanced([piece.total for piece in costs.pieces], len(homes))
        stages = costs_of_stages(costs, bounds, ("none",) * len(costs.pieces))
        works = zero_bubble.works(stages, homes, costs.link)
        counted = [work._replace(held=1, kept=1) for work in works]
        schedule = zero_bubble.automatic(counted, homes, microbatches, [limit(devices)] * devices).schedule
        return staged_plan(name, costs, microbatches, homes, schedule, bounds)

    return Named(make)


def _same(devices: int) -> int:
    return devices


def _twice(devices: int) -> int:
    return 2 * devices


NAMED: dict[str, Named] = {
    **{name: _by_rule(name, rule) for name, rule in SCHEDULES.items()},
    "s_1f1b": Named(_s_1f1b),
    "interleaved_1f1b": _by_rule("interleaved_1f1b", interleaved_1f1b, step=_same),
    "breadth_first": _by_rule("breadth_first", breadth_first),
    "hanayo": _by_rule("hanayo", hanayo),
    "zb1p": _automatic("zb1p", range, limit=_same),
    "zb2p": _automatic("zb2p", range, limit=_twice),
    "zb_v": _automatic("zb_v", vee.placement, limit=_twice),
    "v_half": _by_rule("v_half", vee.v_half),
    "v_min": _by_rule("v_min", vee.v_min),
    "dualpipe_v": _by_rule("dualpipe_v", vee.dualpipe_v, least=_twice),
    "mist": _tuned("mist", adaptive.mist),
    "adapipe": _tuned("adapipe", adaptive.adapipe, least=_same),
    "octopipe": Named(octopipe.octopipe),
    "helix_naive": _helix("helix_naive", 1, recompute=False),
    "helix_naive_recompute": _helix("helix_naive_recompute", 1, recompute=True),
    "helix_two_fold": _helix("helix_two_fold", 2, recompute=False),
    "helix_two_fold_recompute": _helix("helix_two_fold_recompute", 2, recompute=True),
}
"""Everything that `named_plan` makes."""


def named_plan(name: str, costs: CostTable, devices: int, microbatches: int) -> Plan:
    """The plan of a name.

    Raises:
      ValueError: as `check_numbers`, and where the costs do not allow such a plan.
    """
    check_numbers(name, devices, microbatches)
    check_counts(len(costs.pieces), devices)
    return NAMED[name].make(costs, devices, microbatches)


def check_numbers(name: str, devices: int, microbatches: int) -> None:
    """Whether a schedule takes these numbers.

    Raises:
      ValueError: the name is unknown; its schedule, or any, does not take so many devices or micro-batches.
    """
    if name not in NAMED:
        raise ValueError(f"unknown schedule {name!r}; known: {', '.join(NAMED)}")
    check_sizes(devices, microbatches)
    _, step, least = NAMED[name]
    multiple, minimum = step(devices), least(devices)
    if microbatches % multiple or microbatches < minimum:
        wanted = [f"multiples of {multiple}"] if multiple > 1 else []
        wanted += [f"at least {minimum}"] if minimum > multiple else []
        raise ValueError(
            f"schedule {name!r} on {devices} devices takes {' and '.join(wanted)} micro-batches, "
            f"not {microbatches}"
        )
