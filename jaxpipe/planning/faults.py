"""The first wrong action of a schedule that someone else wrote.

Every function returns a `Fault`, or None where it finds nothing wrong.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise, zip_longest
from typing import NamedTuple

from jaxpipe.planning.interchange import Sheet
from jaxpipe.planning.plan import Action

NEEDS = {"I": "F", "B": "F", "W": "I"}
"""What an action needs from its own stage and micro-batch."""

RIVALS = {"F": "", "I": "B", "W": "B", "B": "IW"}
"""What an action cannot stand beside."""


class Place(NamedTuple):
    """A cell of a sheet; column None is the end of the row, where something is missing."""

    device: int
    column: int | None


class Fault(NamedTuple):
    """What is wrong, in one line, and the cells to look at, the first wrong one first."""

    error: str
    places: tuple[Place, ...]


class Shape(NamedTuple):
    """What a sheet without wrong cells says of itself.

    length: stages of each chain, a copy of the model; stage s is the same as stage s + length.
    homes: for each (stage, micro-batch) the device that runs it.
    """

    stages: int
    length: int
    microbatches: int
    homes: dict[tuple[int, int], int]


def wrong_cell(sheet: Sheet, stage_to_device: Sequence[int] | None = None) -> Fault | None:
    """The first action that must not stand where it stands, column by column.

    It is of an unknown stage or micro-batch (after a number that nothing is of), on a wrong device, there
    twice, or before what it needs of its own stage. If there is none, the first placed stage without actions.

    stage_to_device: where each stage belongs; None when its micro-batches may be on any device.
    """
    places: dict[Action, Place] = {}
    for device, row in enumerate(sheet.rows):
        for cell in row:
            for action in cell.actions:
                places.setdefault(action, Place(device, cell.column))
    stages = len(stage_to_device) if stage_to_device else _first_gap(action.stage for action in places)
    microbatches = _first_gap(action.microbatch for action in places)
    if not places:
        return Fault("the schedule has no action", ())
    seen: dict[tuple[int, int], dict[str, Place]] = {}
    for step in zip_longest(*sheet.rows):
        for device, cell in enumerate(step):
            for action in cell.actions if cell else ():
                here = Place(device, cell.column)
                twins = seen.setdefault((action.stage, action.microbatch), {})
                if action.stage >= stages:
                    known = f"they count from 0, and no cell is of stage {stages}"
                    if stage_to_device:
                        known = f"the placement ends at stage {stages - 1}"
                    problem = f"stage {action.stage} is unknown: {known}"
                elif action.microbatch >= microbatches:
                    known = f"they count from 0, and no cell is of micro-batch {microbatches}"
                    problem = f"micro-batch {action.microbatch} is unknown: {known}"
                elif stage_to_device and device != stage_to_device[action.stage]:
                    problem = f"it stands on device {device}, its stage on {stage_to_device[action.stage]}"
                else:
                    problem = _clash(action, here, twins, places)
                if problem:
                    return Fault(f"{where(here)}: {action} is wrong: {problem}", (here,))
                twins[action.phase] = here
    present = {stage for stage, _ in seen}
    for stage, device in enumerate(stage_to_device or ()):
        if stage not in present:
            place = Place(device, None)
            return Fault(
                f"{where(place)}: stage {stage} is placed on device {device} and has no action", (place,)
            )
    return None


def _clash(action: Action, here: Place, twins: dict[str, Place], places: dict[Action, Place]) -> str | None:
    """What is wrong with an action beside `twins`, those of its stage and micro-batch so far, by phase."""
    if action.phase in twins:
        return f"it stands twice, first at {where(twins[action.phase])}"
    for rival in RIVALS[action.phase]:
        if rival in twins:
            twin = action._replace(phase=rival)
            return f"it clashes with {twin} at {where(twins[rival])}; B is I and W at once"
    for phase, place in twins.items():
        if place.device != here.device:
            twin = action._replace(phase=phase)
            return f"it stands on device {here.device}, but {twin} on device {place.device}"
    if action.phase == "F" or NEEDS[action.phase] in twins:
        return None
    needed = action._replace(phase=NEEDS[action.phase])
    if needed not in places:
        return f"it needs {needed}, which is missing"
    if places[needed].device != here.device:
        return f"it needs {needed}, which stands on device {places[needed].device}"
    return f"it stands before {needed} at {where(places[needed])}, whose result it needs"


def shape_of(sheet: Sheet) -> Shape:
    """What a sheet without wrong cells says of itself.

    It has several chains where its stages part into runs of equal length, at least 2, that share no
    micro-batch; one otherwise.
    """
    homes = {
        (action.stage, action.microbatch): device
        for device, row in enumerate(sheet.rows)
        for cell in row
        for action in cell.actions
    }
    stages = 1 + max(stage for stage, _ in homes)
    runs: list[set[int]] = [set() for _ in range(stages)]
    for stage, microbatch in homes:
        runs[stage].add(microbatch)
    bounds = [0, *(s for s in range(1, stages) if runs[s - 1].isdisjoint(runs[s])), stages]
    lengths = {stop - start for start, stop in pairwise(bounds)}
    microbatches = 1 + max(microbatch for _, microbatch in homes)
    parts = [set().union(*runs[start:stop]) for start, stop in pairwise(bounds)]
    apart = len(lengths) == 1 and min(lengths) > 1 and sum(map(len, parts)) == microbatches
    return Shape(stages, min(lengths) if apart else stages, microbatches, homes)


def missing_action(sheet: Sheet, shape: Shape) -> Fault | None:
    """The first stage and micro-batch that is not run by F and B, or by F, I and W."""
    places = {
        action: Place(device, cell.column)
        for device, row in enumerate(sheet.rows)
        for cell in row
        for action in cell.actions
    }
    for first in range(0, shape.stages, shape.length):
        chain = range(first, first + shape.length)
        microbatches = sorted({microbatch for stage, microbatch in shape.homes if stage in chain})
        for stage in chain:
            for microbatch in microbatches:
                phases = {p for p in "FIWB" if Action(stage, p, microbatch) in places}
                if phases in ({"F", "B"}, {"F", "I", "W"}):
                    continue
                wanted = "FIW" if phases & {"I", "W"} else "FB"
                lacking = [Action(stage, p, microbatch) for p in wanted if p not in phases]
                if phases:
                    place = places[Action(stage, min(phases, key="FIWB".index), microbatch)]
                else:
                    place = Place(next(d for (s, _), d in shape.homes.items() if s == stage), None)
                names = " and ".join(map(str, lacking))
                need = f"stage {stage} must run micro-batch {microbatch} by F and B, or by F, I and W"
                return Fault(f"{where(place)}: {names} missing: {need}", (place,))
    return None


def where(place: Place) -> str:
    """Device and column of a cell as grids show them: devices, the rows, from 0, and columns from 1."""
    return f"device {place.device}, " + (f"column {place.column}" if place.column else "end")


def _first_gap(numbers: Iterable[int]) -> int:
    """The least number of at least 0 that is none of `numbers`."""
    known, gap = set(numbers), 0
    while gap in known:
        gap += 1
    return gap
