"""Candidates of the search for a plan: partition, placement, recompute, and a setting of the list scheduler.

A candidate is worth the makespan of the schedule that the list scheduler makes of it within the memory limit.
"""

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from jaxpipe.costs.table import CostTable
from jaxpipe.planning import engine
from jaxpipe.planning.list_scheduler import Lines, Rows, Setting, least_memory, list_schedule
from jaxpipe.planning.padded import Padding, make_padding, padded_registers, padded_state
from jaxpipe.planning.plan import PHASES, Action, Plan
from jaxpipe.planning.stages import costs_of_stages

COLUMNS = ("F", "I", "W", "stash_bytes", "grad_stash_bytes", "made_bytes", "state_bytes")
"""Fields of `StageCost` that are sums over pieces, in the order of `Space.value_2xNxC`."""
_F, _I, _W, _HELD, _KEPT, _MADE, _STATE = range(len(COLUMNS))

PLAIN = Setting(1.0, 1.0, patience=0.0)
"""1F1B where a device has one stage: a micro-batch is never held up on its way, backwards go first."""
SQUEEZES = 4
"""How often a schedule is made again with less memory, until padding it fits."""


class Candidate(NamedTuple):
    """Stage s holds the pieces bounds[s] to bounds[s + 1] - 1 and is on device homes[s].

    full: for every piece whether it is computed again.
    """

    bounds: tuple[int, ...]
    homes: tuple[int, ...]
    full: tuple[bool, ...]
    setting: Setting


class Space(NamedTuple):
    """What candidates are scored with.

    limit: memory of a device in bytes, infinite for none.
    split: whether I and W run apart.
    value_2xNxC: COLUMNS of each piece, without and with recompute. message_N: time of the message behind it.
    padding: where the limit is one of padded memory.
    """

    costs: CostTable
    devices: int
    microbatches: int
    limit: float
    split: bool
    value_2xNxC: np.ndarray
    message_N: np.ndarray
    padding: Padding | None

    @property
    def time_2xN(self) -> np.ndarray:
        """Time of all phases of each piece, without and with recompute."""
        return self.value_2xNxC[:, :, :_HELD].sum(2)

    @property
    def held_2xN(self) -> np.ndarray:
        """Bytes of each piece from F to I."""
        return self.value_2xNxC[:, :, _HELD]

    @property
    def state_N(self) -> np.ndarray:
        """Resident bytes of each piece."""
        return self.value_2xNxC[0, :, _STATE]


class Scored(NamedTuple):
    """A candidate with its makespan, infinite where it has no schedule, and that schedule."""

    makespan: float
    candidate: Candidate
    rows: Rows


def make_space(
    costs: CostTable,
    devices: int,
    microbatches: int,
    memory_model: str,
    split: bool,
) -> Space:
    """The space of a problem; `costs` has the memory limit. memory_model: "ideal" or "padded"."""
    count = len(costs.pieces)
    alone = [costs_of_stages(costs, range(count + 1), (policy,) * count) for policy in ("none", "full")]
    value = np.array([[[getattr(s, name) for name in COLUMNS] for s in stages] for stages in alone], float)
    if not split:
        value[:, :, _I] += value[:, :, _W]
        value[:, :, [_W, _KEPT, _MADE]] = 0.0
    limit = costs.memory_limit_bytes
    return Space(
        costs=costs,
        devices=devices,
        microbatches=microbatches,
        limit=np.inf if limit is None else float(limit),
        split=split,
        value_2xNxC=value,
        message_N=np.array([costs.link.time(piece.output_bytes) for piece in costs.pieces], float),
        padding=make_padding(costs) if memory_model == "padded" and limit is not None else None,
    )


def loads(space: Space, candidate: Candidate) -> np.ndarray:
    """Time of one micro-batch on each device."""
    time_N = np.where(candidate.full, space.time_2xN[1], space.time_2xN[0])
    time_S = np.add.reduceat(time_N, candidate.bounds[:-1])
    return np.bincount(candidate.homes, time_S, space.devices)


class Need(NamedTuple):
    """The least memory in bytes with which a candidate has a schedule.

    total: of the device that needs most. state: of that what parameters stand for. device: its number.
    """

    total: float
    state: float
    device: int


def score(space: Space, candidate: Candidate, deadline: float = np.inf) -> Scored:
    """Schedules a candidate. What needs more than `deadline` or more memory than there is scores infinity."""
    lines, state_D = _lines(space, candidate)
    if space.padding:
        state_D[:] = _state(space, candidate)
    room_D = space.limit - state_D
    rows = list_schedule(lines, room_D, space.microbatches, candidate.setting, deadline)
    if space.padding:
        rows = _squeezed(space, candidate, lines, room_D, rows, deadline)
    return Scored(float(rows.end_D.max()), candidate, rows)


def need(space: Space, candidate: Candidate) -> Need:
    """What a candidate needs with one micro-batch at a time on each device."""
    lines, state_D = _lines(space, candidate)
    least_D = _least(lines, space.devices)
    device = int((least_D + state_D).argmax())
    if not space.padding:
        return Need(float(least_D[device] + state_D[device]), float(state_D[device]), device)
    rows = list_schedule(lines, least_D, space.microbatches, candidate.setting)
    state = _state(space, candidate)
    # The scheduler asks for room for the stash of all stages at once, even where padding shares it.
    total = max(state + _registers(space, candidate, rows), state + float(least_D.max()))
    return Need(total, state, device)


def _squeezed(space, candidate, lines, room_D, rows, deadline) -> Rows:
    """A schedule for which what padding adds fits, too: made again with less memory until it does."""
    least_D = _least(lines, space.devices)
    allowed_D, room = room_D, float(room_D[0])
    for attempt in range(1, SQUEEZES + 1):
        if rows.end_D.max() == np.inf:
            return rows
        needed = _registers(space, candidate, rows)
        if needed <= room:
            return rows
        allowed_D = np.maximum(least_D, allowed_D * (room / needed)) if attempt < SQUEEZES else least_D
        rows = list_schedule(lines, allowed_D, space.microbatches, candidate.setting, deadline)
    if rows.end_D.max() < np.inf and _registers(space, candidate, rows) > room:
        rows.end_D[:] = np.inf
    return rows


def _least(lines: Lines, devices: int) -> np.ndarray:
    """By device the least memory with which there is a schedule."""
    least_D = np.zeros(devices)
    np.maximum.at(least_D, lines.device_S, least_memory(lines))
    return least_D


def _state(space: Space, candidate: Candidate) -> float:
    """Padded bytes of the parameters."""
    return padded_state(space.padding, candidate.bounds, candidate.homes, space.devices)


def _registers(space: Space, candidate: Candidate, rows: Rows) -> float:
    """Padded bytes of the registers."""
    flat = _flat(space, candidate, rows)
    return padded_registers(space.padding, candidate.bounds, candidate.full, flat)


def to_plan(space: Space, name: str, scored: Scored) -> Plan:
    """The plan of a candidate that has a schedule."""
    first, *columns = _flat(space, scored.candidate, scored.rows)
    stage, phase, microbatch = (column.tolist() for column in columns)
    actions = [Action(s, PHASES[p], m) for s, p, m in zip(stage, phase, microbatch)]
    schedule = tuple(tuple(actions[low:high]) for low, high in pairwise(first.tolist()))
    return replace(_plan(space, scored.candidate), name=name, schedule=schedule)


def _plan(space: Space, candidate: Candidate) -> Plan:
    """A plan without a schedule."""
    return Plan(
        name="",
        devices=space.devices,
        microbatches=space.microbatches,
        pieces=tuple(piece.name for piece in space.costs.pieces),
        stage_bounds=candidate.bounds,
        stage_to_device=candidate.homes,
        recompute=tuple("full" if again else "none" for again in candidate.full),
        schedule=(),
    )


def _flat(space: Space, candidate: Candidate, rows: Rows) -> engine.Rows:
    """The schedule in the engine's arrays, with B in place of I where W takes no time, and without such W."""
    lines, _ = _lines(space, candidate)
    taken_DN = np.arange(rows.code_DN.shape[1]) < rows.count_D[:, None]
    step, microbatch = np.divmod(rows.code_DN[taken_DN], space.microbatches)
    device = np.repeat(np.arange(space.devices), rows.count_D)
    stage, phase = np.divmod(step, 3)
    joined = lines.time_SP[stage, 2] == 0
    kept = ~joined | (phase != 2)
    phase[joined & (phase == 1)] = PHASES.index("B")
    first = np.searchsorted(device[kept], np.arange(space.devices + 1))
    return engine.Rows(first, *(array[kept].astype(np.int32) for array in (stage, phase, microbatch)))


def _lines(space: Space, candidate: Candidate) -> tuple[Lines, np.ndarray]:
    """What the scheduler needs, and the bytes of state on each device."""
    starts = np.array(candidate.bounds, np.int64)
    value_NC = space.value_2xNxC[np.array(candidate.full, np.int64), np.arange(len(space.message_N))]
    value_SC = np.add.reduceat(value_NC, starts[:-1], axis=0)
    homes = np.array(candidate.homes, np.int64)
    held, kept = value_SC[:, _HELD], value_SC[:, _KEPT]
    message_S = space.message_N[starts[1:] - 1]
    message_S[:-1][homes[1:] == homes[:-1]] = 0.0
    lines = Lines(
        time_SP=value_SC[:, :_HELD].copy(),
        change_SP=np.stack([held, kept - held, -kept], axis=1),
        made_S=value_SC[:, _MADE].copy(),
        message_S=message_S,
        device_S=homes,
    )
    return lines, np.bincount(homes, value_SC[:, _STATE], space.devices)
