"""Random changes of a candidate, most of which take work from a device that has much of it."""

from collections.abc import Callable, Collection
from itertools import pairwise
from random import Random

import numpy as np

from jaxpipe.planning.candidate import Candidate
from jaxpipe.planning.list_scheduler import ORDERS
from jaxpipe.planning.spread import merged

SCALES = (0.7, 0.85, 0.93, 1.08, 1.2, 1.5)
"""Factors on `forward` and `backward` of a setting."""

Move = Callable[[Candidate, np.ndarray, Random], Candidate | None]
"""(candidate, load of each device, chance) -> the changed candidate, or None where it cannot be done."""


def shift_piece(candidate: Candidate, load_D: np.ndarray, chance: Random) -> Candidate | None:
    """A stage of a loaded device gives a piece to another stage; the bounds between them shift by one."""
    giver = _loaded_stage(candidate, load_D, chance)
    taker = chance.randrange(len(candidate.homes))
    if taker == giver:
        return None
    bounds = list(candidate.bounds)
    if giver < taker:
        for stage in range(giver, taker):
            bounds[stage + 1] -= 1
    else:
        for stage in range(giver, taker, -1):
            bounds[stage] += 1
    if any(high < low for low, high in pairwise(bounds)):
        return None
    return _merged(candidate, bounds, candidate.homes)


def shift_piece_only(candidate: Candidate, load_D: np.ndarray, chance: Random) -> Candidate | None:
    """As `shift_piece`, and no stage is left empty."""
    changed = shift_piece(candidate, load_D, chance)
    return changed if changed and len(changed.homes) == len(candidate.homes) else None


def split_stage(candidate: Candidate, load_D: np.ndarray, chance: Random) -> Candidate | None:
    """A stage of a loaded device is cut in two, or three, and one part goes to a less loaded device."""
    stage = _loaded_stage(candidate, load_D, chance)
    start, stop = candidate.bounds[stage : stage + 2]
    if stop - start < 2:
        return None
    low, high = sorted((chance.randint(start, stop), chance.randint(start, stop)))
    if chance.random() < 0.5:  # at one end
        low, high = (start, high) if chance.random() < 0.5 else (low, stop)
    if low == high or (low, high) == (start, stop):
        return None
    home, taker = candidate.homes[stage], _light_device(load_D, chance)
    bounds = (*candidate.bounds[: stage + 1], low, high, *candidate.bounds[stage + 1 :])
    homes = (*candidate.homes[:stage], home, taker, home, *candidate.homes[stage + 1 :])
    return _merged(candidate, bounds, homes)


def move_stage(candidate: Candidate, load_D: np.ndarray, chance: Random) -> Candidate | None:
    """A stage of a loaded device goes to a less loaded one."""
    stage = _loaded_stage(candidate, load_D, chance)
    homes = list(candidate.homes)
    homes[stage] = _light_device(load_D, chance)
    return _merged(candidate, candidate.bounds, homes)


def swap_stages(candidate: Candidate, load_D: np.ndarray, chance: Random) -> Candidate | None:
    """Two stages change places."""
    del load_D
    homes = list(candidate.homes)
    one, other = chance.randrange(len(homes)), chance.randrange(len(homes))
    homes[one], homes[other] = homes[other], homes[one]
    return _merged(candidate, candidate.bounds, homes)


def swap_stages_only(candidate: Candidate, load_D: np.ndarray, chance: Random) -> Candidate | None:
    """As `swap_stages`, and no stages become one."""
    changed = swap_stages(candidate, load_D, chance)
    return changed if changed and len(changed.homes) == len(candidate.homes) else None


def change_setting(candidate: Candidate, load_D: np.ndarray, chance: Random) -> Candidate:
    """Another value of one or two switches of the scheduler."""
    del load_D
    setting = candidate.setting
    for _ in range(chance.choice((1, 1, 2))):
        field = chance.randrange(len(setting))
        if field < 2:
            bounded = setting.forward if setting.forward < 1e6 else 3.0
            change = {
                0: {"forward": bounded * chance.choice(SCALES)},
                1: {"backward": setting.backward * chance.choice(SCALES)},
            }[field]
            if field == 0 and chance.random() < 0.1:
                change = {"forward": float("inf")}
        else:
            change = (
                {"order": chance.choice(ORDERS)},
                {"reserve": not setting.reserve},
                {"patience": chance.choice((0.0, 0.25, 0.5, 1.0))},
                {"catch_up": not setting.catch_up},
                {"defer": chance.choice((0.0, 0.25, 0.5, 1.0))},
            )[field - 2]
        setting = setting._replace(**change)
    return candidate._replace(setting=setting)


def toggle_recompute(candidate: Candidate, load_D: np.ndarray, chance: Random) -> Candidate:
    """Some neighbouring pieces of a stage are computed again, or no longer."""
    del load_D
    stage = chance.randrange(len(candidate.homes))
    start, stop = candidate.bounds[stage : stage + 2]
    low, high = sorted((chance.randrange(start, stop), chance.randrange(start, stop)))
    if chance.random() < 0.5:
        high = low
    full, again = list(candidate.full), chance.random() < 0.5
    full[low : high + 1] = [again] * (high + 1 - low)
    return candidate._replace(full=tuple(full))


WEIGHTS: dict[tuple[str, ...], dict[Move, int]] = {
    ("partition", "placement"): {shift_piece: 60, split_stage: 10, move_stage: 6, swap_stages: 4},
    ("partition",): {shift_piece_only: 60},
    ("placement",): {move_stage: 10, swap_stages_only: 10},
    ("schedule",): {change_setting: 20},
    ("recompute",): {toggle_recompute: 15},
}
"""How often each move is tried. Partition and placement together make moves that neither makes alone."""


def moves_of(words: Collection[str]) -> dict[Move, int]:
    """The moves that change only what `words` name."""
    both = {"partition", "placement"} <= set(words)
    found = {}
    for needed, moves in WEIGHTS.items():
        if set(needed) <= set(words) and not (both and needed in (("partition",), ("placement",))):
            found |= moves
    return found


def _merged(candidate: Candidate, bounds, homes) -> Candidate:
    bounds, homes = merged(bounds, homes)
    return candidate._replace(bounds=bounds, homes=homes)


def _loaded_stage(candidate: Candidate, load_D: np.ndarray, chance: Random) -> int:
    """A stage of the device with the most load or, half the time, of any."""
    homes = candidate.homes
    if chance.random() < 0.5:
        return chance.randrange(len(homes))
    fullest = int(load_D.argmax())
    # A device without stages is the fullest only where nothing takes time.
    return chance.choice([stage for stage, home in enumerate(homes) if home == fullest] or range(len(homes)))


def _light_device(load_D: np.ndarray, chance: Random) -> int:
    """A device, the likelier the less load it has."""
    one, other = chance.randrange(len(load_D)), chance.randrange(len(load_D))
    return one if load_D[one] <= load_D[other] else other
