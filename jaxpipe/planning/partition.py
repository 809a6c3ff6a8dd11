"""Partitions of a line of pieces into contiguous, nonempty parts."""

from collections.abc import Sequence

import numpy as np


def even(count: int, parts: int) -> tuple[int, ...]:
    """Bounds of `parts` parts with equal numbers of pieces; the first take one more where it does not divide.

    Part k holds the pieces bounds[k] to bounds[k + 1] - 1.

    Raises:
      ValueError: when there are fewer pieces than parts.
    """
    check_counts(count, parts)
    size, extra = divmod(count, parts)
    return tuple(k * size + min(k, extra) for k in range(parts + 1))


def balanced(weights: Sequence[float], parts: int) -> tuple[int, ...]:
    """Bounds of the partition whose largest part weighs least.

    Among equals the one with the least sum of squares is taken. Exact dynamic programming
    in two passes, since the best prefix under both criteria at once need not be part of the best
    whole: first the least possible maximum, then the least sum of squares among partitions whose
    parts do not exceed it. Time parts * len(weights)**2, vectorised.

    Raises:
      ValueError: when there are fewer pieces than parts, or a weight is negative or not finite.
    """
    count = len(weights)
    check_counts(count, parts)
    weight_N = np.asarray(weights, np.float64)
    wrong = np.flatnonzero(~(np.isfinite(weight_N) & (weight_N >= 0)))
    if wrong.size:
        raise ValueError(
            f"weight {wrong[0]} is {weights[wrong[0]]!r}; expected a finite number of at least 0"
        )
    prefix = np.concatenate([[0.0], np.cumsum(weight_N)])
    # part[i, j]: weight of the pieces i to j - 1; infinite where that part would be empty.
    part = np.where(
        np.arange(count + 1)[:, None] < np.arange(count + 1), prefix[None] - prefix[:, None], np.inf
    )

    largest = part[0]
    for _ in range(parts - 1):
        largest = np.maximum(largest[:, None], part).min(axis=0)

    square = np.where(part <= largest[count], part, np.inf) ** 2
    total, cuts = square[0], []
    for _ in range(parts - 1):
        options = total[:, None] + square
        cuts.append(options.argmin(axis=0))
        total = options.min(axis=0)
    bounds = [count]
    for cut in reversed(cuts):
        bounds.append(int(cut[bounds[-1]]))
    return (0, *reversed(bounds))


def check_counts(count: int, parts: int, what: str = "piece", where: str = "devices") -> None:
    """Raises ValueError when `count` pieces cannot be cut into so many nonempty parts.

    what: one of those that are cut. where: what the parts are for.
    """
    if parts < 1:
        raise ValueError(f"cannot cut pieces into {parts} parts; expected at least 1")
    if count < parts:
        counted = f"{count} {what}" if count == 1 else f"{count} {what}s"
        raise ValueError(f"{counted} cannot fill {parts} {where}; expected a {what} for each at least")
