"""Memory that one program for all devices (SPMD) allocates: of each kind as much as the fullest needs."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit

from jaxpipe.costs.table import CostTable
from jaxpipe.planning.engine import Rows
from jaxpipe.planning.plan import PHASES, Plan
from jaxpipe.planning.stages import held_bytes

_F, _I, _W, _B = map(PHASES.index, "FIWB")
_LIVES = np.array([(1, 1, 0), (1, 0, 0), (0, 1, 1)])
"""Of the stash what W needs, the rest of it, and what I makes for W: whether each is part of the stash, of
what W needs, and of what I makes."""


class Padding(NamedTuple):
    """What padding has to know about the pieces of a table, so that many plans can be counted fast.

    kind_N: number of each piece's kind. state_N: bytes of its parameters, gradients and optimizer state.
    class_2xNx3: class of the registers of each piece, without and with recompute, by _LIVES; size_2xNx3:
    their bytes.
    """

    kind_N: np.ndarray
    state_N: np.ndarray
    class_2xNx3: np.ndarray
    size_2xNx3: np.ndarray


def make_padding(costs: CostTable) -> Padding:
    """The padding of a table's pieces; see `padded_bytes`."""
    numbers: dict[tuple, int] = {}
    classes, sizes = [], []
    for policy in ("none", "full"):
        for i, piece in enumerate(costs.pieces):
            stash, gradient = held_bytes(costs, i, policy)
            kept = min(stash, gradient)
            for life, size in enumerate((kept, stash - kept, gradient - kept)):
                message = policy == "full" and not _LIVES[life, 2]
                key = ("input", size) if message else (piece.kind, policy, life)
                classes.append(numbers.setdefault(key, len(numbers)))
                sizes.append(size)
    kinds = {kind: number for number, kind in enumerate({piece.kind: None for piece in costs.pieces})}
    shape = (2, len(costs.pieces), len(_LIVES))
    return Padding(
        kind_N=np.array([kinds[piece.kind] for piece in costs.pieces]),
        state_N=costs.state_factor * np.array([piece.param_bytes for piece in costs.pieces], np.float64),
        class_2xNx3=np.array(classes).reshape(shape),
        size_2xNx3=np.array(sizes, np.float64).reshape(shape),
    )


def padded_bytes(plan: Plan, costs: CostTable, rows: Rows) -> float:
    """Bytes that every device allocates when all devices run one program.

    Parameters: each device has as many slots of a kind of piece as the device with most pieces of it,
    and a slot has the bytes of the kind's largest piece, times the table's `state_factor`.

    Registers: each device has as many of a class as are ever alive at once on any device. The pieces of one
    kind and recompute policy have three classes: what W needs of the stash, what it does not need, and what
    I makes for W; a register has the bytes of the class's largest piece. Inputs that pieces with recompute
    "full" stash are messages: those of equal bytes are one class, whatever the kind and whether W needs them.

    The executor (program/registers.py, runtime/memory.py) also rounds numbers of registers up to
    buckets, and has registers for messages, buffers for those on their way, and workspace; these
    are left out.
    """
    padding, bounds = make_padding(costs), plan.stage_bounds
    state = padded_state(padding, bounds, plan.stage_to_device, plan.devices)
    return state + padded_registers(padding, bounds, [policy == "full" for policy in plan.recompute], rows)


def padded_state(padding: Padding, bounds: Sequence[int], homes: Sequence[int], devices: int) -> float:
    """The bytes of parameters with their gradients and optimizer state on every device."""
    kinds = padding.kind_N.max() + 1
    home_N = np.repeat(homes, np.diff(bounds))
    slots_DxK = np.bincount(home_N * kinds + padding.kind_N, minlength=devices * kinds).reshape(
        devices, kinds
    )
    largest_K = np.zeros(kinds)
    np.maximum.at(largest_K, padding.kind_N, padding.state_N)
    return float(slots_DxK.max(axis=0) @ largest_K)


def padded_registers(padding: Padding, bounds: Sequence[int], full: Sequence[bool], rows: Rows) -> float:
    """The bytes of registers on every device. full: of each piece whether it is computed again."""
    policy_N, pieces, stages = np.array(full, np.int64), np.arange(len(full)), len(bounds) - 1
    class_Nx3, size_Nx3 = padding.class_2xNx3[policy_N, pieces], padding.size_2xNx3[policy_N, pieces]
    largest_C = np.zeros(padding.class_2xNx3.max() + 1)
    np.maximum.at(largest_C, class_Nx3, size_Nx3)
    used = np.flatnonzero(largest_C)
    number_CxSx3 = np.zeros((len(largest_C), stages, 3), np.int64)
    stage_N = np.repeat(np.arange(stages), np.diff(bounds))
    np.add.at(number_CxSx3, (class_Nx3, stage_N[:, None]), _LIVES)
    return float(most_alive(rows.first, rows.stage, rows.phase, number_CxSx3[used]) @ largest_C[used])


@njit(cache=True, nogil=True)
def most_alive(first_D, stage_A, phase_A, number_CxSx3):
    """The most registers of each class that any device ever holds: [C].

    number_CxSx3: of a class for each stage in its stash, in what its W needs, and in what its I makes for W.
    I makes some before it frees others.
    """
    most_C = np.zeros(len(number_CxSx3), np.int64)
    for c in range(len(number_CxSx3)):
        for device in range(len(first_D) - 1):
            alive = 0
            for action in range(first_D[device], first_D[device + 1]):
                stash, gradient, made = number_CxSx3[c, stage_A[action]]
                phase = phase_A[action]
                if phase == _F:
                    alive += stash
                elif phase == _I:
                    alive += made
                most_C[c] = max(most_C[c], alive)
                if phase == _I:
                    alive -= stash + made - gradient
                elif phase == _W:
                    alive -= gradient
                elif phase == _B:
                    alive -= stash
    return most_C
