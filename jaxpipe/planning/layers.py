"""Layers of a line of pieces, told by their names and kinds."""

from collections.abc import Sequence

from jaxpipe.costs.table import PieceCost
from jaxpipe.planning.partition import check_counts, even

EMBEDDING, HEAD = "embed", "head"
"""Kinds of pieces that are not part of a layer."""


def layer_starts(pieces: Sequence[PieceCost]) -> tuple[int, ...]:
    """Indices of the first piece of every layer, and behind them that of the piece after the last layer.

    Leading pieces of kind "embed" and trailing ones of kind "head" belong to no layer. Of the others,
    neighbours whose names agree up to the first "/" (`layer_03/pre`, `layer_03/mlp`, as models name them)
    are one layer; a piece without "/" in its name, as in tables from elsewhere, is a layer of its own.
    """
    first, last = 0, len(pieces)
    while first < last and pieces[first].kind == EMBEDDING:
        first += 1
    while last > first and pieces[last - 1].kind == HEAD:
        last -= 1
    layers = [piece.name.partition("/")[0] if "/" in piece.name else "" for piece in pieces]
    starts = [i for i in range(first, last) if i == first or not layers[i] or layers[i] != layers[i - 1]]
    return (*starts, last)


def even_layers(pieces: Sequence[PieceCost], parts: int) -> tuple[int, ...]:
    """Bounds of `parts` parts with equal numbers of layers; the first take one more where it does not divide.

    What stands before the first layer joins the first part, what stands after the last one the last part.

    Raises:
      ValueError: when there are fewer layers than parts.
    """
    starts = layer_starts(pieces)
    layers = len(starts) - 1
    check_counts(layers, parts, "layer")
    inner = [starts[bound] for bound in even(layers, parts)[1:-1]]
    return (0, *inner, len(pieces))
