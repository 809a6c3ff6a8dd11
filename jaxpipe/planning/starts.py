"""Candidates that a search begins with."""

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from jaxpipe.planning.candidate import PLAIN, Candidate, Space
from jaxpipe.planning.layers import even_layers, layer_starts
from jaxpipe.planning.list_scheduler import BY_TIMETABLE, I_FIRST, IN_TURN, Setting
from jaxpipe.planning.partition import balanced, even
from jaxpipe.planning.refit import refit
from jaxpipe.planning.spread import merged, placements, spread

SETTINGS = tuple(
    Setting(forward, backward, order)
    for order in (IN_TURN, I_FIRST, BY_TIMETABLE)
    for forward, backward in ((np.inf, 1.0), (2.0, 1.0), (1.0, 1.0), (4.0, 2.0))
)
"""Settings that starts are tried with."""


def starts(space: Space, words: Collection[str]) -> list[Candidate]:
    """Candidates of every placement and recompute policy that `words` let the search choose.

    What is not chosen is as in 1F1B: layers split evenly by number, one stage a device, nothing recomputed,
    backwards first with I and W at once.

    Raises:
      ValueError: the partition is not chosen, and there are fewer layers than devices.
    """
    stages = [
        (bounds, homes, full)
        for full in _recomputed(space, words)
        for bounds, homes in _stages(space, words, full)
    ]
    if "recompute" in words and space.limit < np.inf:
        stages += [(bounds, homes, _fitted(space, bounds, homes)) for bounds, homes, _ in stages]
    return [Candidate(*stage, PLAIN) for stage in dict.fromkeys(stages)]


def lean_starts(space: Space, words: Collection[str]) -> list[Candidate]:
    """The starts, and their stages with as much computed again as saves memory, whatever the limit."""
    found = starts(space, words)
    if "recompute" in words:
        found += [candidate._replace(full=_saving(space)) for candidate in found]
    return found


def _recomputed(space: Space, words: Collection[str]) -> Iterator[tuple[bool, ...]]:
    """Nothing computed again, or everything that saves memory; what lies between depends on the stages."""
    yield (False,) * len(space.message_N)
    if "recompute" in words and space.limit < np.inf:
        yield _saving(space)


def _saving(space: Space) -> tuple[bool, ...]:
    """Everything computed again that saves memory."""
    none_N, full_N = space.held_2xN
    return tuple((full_N < none_N).tolist())


def _fitted(space: Space, bounds: Sequence[int], homes: Sequence[int]) -> tuple[bool, ...]:
    """Recompute that fits the micro-batches in flight in an ideal 1F1B of the stages."""
    value_NC = space.value_2xNxC[0]
    time_S = np.add.reduceat(value_NC[:, :2].sum(1), bounds[:-1])
    load_D = np.bincount(homes, np.add.reduceat(space.time_2xN[0], bounds[:-1]), space.devices)
    trip_S = np.cumsum(time_S[::-1])[::-1]
    flight_S = (
        np.clip(np.ceil(trip_S / load_D.max()), 1, space.microbatches) if load_D.max() else 1.0 + 0 * trip_S
    )
    home_N = np.repeat(homes, np.diff(bounds))
    flight_DxN = np.zeros((space.devices, len(home_N)))
    flight_DxN[home_N, np.arange(len(home_N))] = np.repeat(flight_S, np.diff(bounds))
    state_D = np.bincount(home_N, space.state_N, space.devices)
    return refit(space.costs, flight_DxN, state_D, space.limit)


def _stages(
    space: Space, words: Collection[str], full: tuple[bool, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(bounds, homes)."""
    pieces, devices = space.costs.pieces, space.devices
    time_N = np.where(full, space.time_2xN[1], space.time_2xN[0])
    line = tuple(range(devices))
    if "partition" in words:
        yield balanced(time_N, devices), line
        if "placement" in words:
            for homes in placements(devices, len(pieces)):
                yield spread(time_N, homes)
                yield even(len(pieces), len(homes)), homes
        if space.limit < np.inf:
            yield from _lean(space, words, full)
        return
    layers = len(layer_starts(pieces)) - 1
    if "placement" not in words or layers < devices:  # the latter raises
        yield even_layers(pieces, devices), line
    else:
        for homes in placements(devices, layers):
            yield even_layers(pieces, len(homes)), homes


def _lean(space: Space, words: Collection[str], full: tuple[bool, ...]):
    """(bounds, homes) that share out memory in place of time: in a line, and piece by piece."""
    size_N = space.state_N + np.where(full, space.held_2xN[1], space.held_2xN[0])
    yield balanced(size_N, space.devices), tuple(range(space.devices))
    if "placement" in words:
        homes, held_D = np.zeros(len(size_N), np.int64), np.zeros(space.devices)
        for i in np.argsort(-size_N, kind="stable"):
            homes[i] = held_D.argmin()
            held_D[homes[i]] += size_N[i]
        yield merged(range(len(size_N) + 1), homes.tolist())
