"""Output heads and embeddings cut along the vocabulary into shards that may stand on several devices.

Shards are ordinary pieces in a row. Those of a head hand the hidden state on, with the running maximum and
sum of the softmax; the last one knows the loss, and the gradient of the hidden state grows shard by shard on
the way back. Those of an embedding hand on the sum of the rows found so far. (Yeung et al. 2024, arXiv
2411.05288, split vocabularies over all devices too, with collectives in place of the row.)
"""

from dataclasses import replace

from jaxpipe.costs.table import CostTable, PieceCost
from jaxpipe.planning.layers import EMBEDDING, HEAD
from jaxpipe.planning.stages import input_bytes


def split_vocabulary(costs: CostTable, head: int, embedding: int = 1) -> CostTable:
    """The table with shards `NAME/0`, `NAME/1`, ... in place of each piece of kind "head" and "embed".

    A shard has its part of the time and of the parameters. It stashes all of the hidden state that it reads
    and its part of the rest. A head without a forward of its own, which computes its loss in the backward,
    gets one, as its shards need the sum of the softmax before the first gradient: one of the three equal
    matmuls (logits, gradient of the input, gradient of the weight) of the backward, which stays as it is.

    head, embedding: numbers of shards; 1 leaves the pieces as they are.
    """
    pieces = []
    for i, piece in enumerate(costs.pieces):
        parts = {HEAD: head, EMBEDDING: embedding}.get(piece.kind, 1)
        pieces += [piece] if parts == 1 else _shards(piece, parts, input_bytes(costs, i))
    return replace(costs, pieces=tuple(pieces))


def _shards(piece: PieceCost, parts: int, read: int) -> list[PieceCost]:
    head = piece.kind == HEAD
    forward = piece.F or (piece.total / 3 if head else 0.0)
    shard = replace(
        piece,
        F=forward / parts,
        I=piece.I / parts,
        W=piece.W / parts,
        param_bytes=piece.param_bytes / parts,
        stash_bytes=_share(piece.stash_bytes, parts, read),
        grad_stash_bytes=_share(piece.grad_stash_bytes, parts, read),
        output_bytes=read if head else piece.output_bytes,
    )
    shards = [replace(shard, name=f"{piece.name}/{number}") for number in range(parts)]
    return [*shards[:-1], replace(shards[-1], output_bytes=piece.output_bytes)]


def _share(size: float, parts: int, read: float) -> float:
    """Of the bytes that a piece holds those of one shard: all that it reads, as far as it holds it."""
    whole = min(size, read)
    return whole + (size - whole) / parts
