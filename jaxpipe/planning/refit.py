"""Which pieces to compute again so that given numbers of micro-batches in flight fit."""

import numpy as np

from jaxpipe.costs.table import CostTable
from jaxpipe.planning.stages import held_bytes


def refit(costs: CostTable, flight_DxN: np.ndarray, state_D: np.ndarray, limit: float) -> tuple[bool, ...]:
    """For every piece whether it is computed again: first those that save most bytes for the time.

    What does not fit even with everything recomputed that saves memory keeps all that recomputed.

    flight_DxN: micro-batches of each piece that each device holds at once. limit: bytes of a device.
    """
    pieces = range(len(costs.pieces))
    stash_2xN = np.array([[held_bytes(costs, i, policy)[0] for i in pieces] for policy in ("none", "full")])
    saved_N = stash_2xN[0] - stash_2xN[1]
    time_N = np.array([piece.F for piece in costs.pieces])
    full_N = np.zeros(len(pieces), bool)
    held_D = state_D + flight_DxN @ stash_2xN[0]
    # Bytes saved for a unit of time, the best first; what takes no time saves for free.
    worth_N = saved_N / np.maximum(time_N, 1e-30)
    for i in np.argsort(-worth_N, kind="stable"):
        over_D = held_D > limit
        if saved_N[i] > 0 and (flight_DxN[over_D, i] > 0).any():
            full_N[i] = True
            held_D -= flight_DxN[:, i] * saved_N[i]
    return tuple(full_N.tolist())
