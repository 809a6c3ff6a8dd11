import pytest

from jaxpipe.costs.table import CostTable, Link, PieceCost
from jaxpipe.planning.head_split import split_vocabulary

EMBED = PieceCost("embed", "embed", 1, 0, 4, param_bytes=80, stash_bytes=12, output_bytes=16)
BLOCK = PieceCost("block", "mlp", 2, 2, 2, param_bytes=10, stash_bytes=20, output_bytes=16)
HEAD = PieceCost("head", "head", 0, 6, 3, param_bytes=80, stash_bytes=24, grad_stash_bytes=20, output_bytes=2)
COSTS = CostTable("unit", (EMBED, BLOCK, HEAD), Link(1, 2), 1000, 3)


def test_names_and_kinds():
    pieces = split_vocabulary(COSTS, head=3, embedding=2).pieces
    assert [piece.name for piece in pieces] == ["embed/0", "embed/1", "block", "head/0", "head/1", "head/2"]
    assert [piece.kind for piece in pieces] == ["embed"] * 2 + ["mlp"] + ["head"] * 3


def test_one_shard_is_the_whole():
    assert split_vocabulary(COSTS, 1) == COSTS
    assert split_vocabulary(COSTS, 1, 1) == COSTS
    assert split_vocabulary(COSTS, 2).pieces[:2] == COSTS.pieces[:2]


def test_all_but_the_pieces_stays():
    found = split_vocabulary(COSTS, 2, 2)
    assert (found.link, found.memory_limit_bytes, found.state_factor) == (Link(1, 2), 1000, 3)


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_time_and_parameters_are_shared_out(parts):
    pieces = split_vocabulary(COSTS, parts, parts).pieces
    for whole, kind in ((EMBED, "embed"), (HEAD, "head")):
        shards = [piece for piece in pieces if piece.kind == kind]
        assert len(shards) == parts
        for name in ("I", "W", "param_bytes"):
            assert sum(getattr(s, name) for s in shards) == pytest.approx(getattr(whole, name))
            assert len({getattr(shard, name) for shard in shards}) == 1
    assert sum(piece.F for piece in pieces if piece.kind == "embed") == pytest.approx(1)


def test_a_head_gets_the_forward_that_its_shards_need():
    """One of three equal matmuls, beside the backward, which makes the logits once more; a forward stays."""
    shards = split_vocabulary(COSTS, 2).pieces[2:]
    assert [(piece.F, piece.I, piece.W) for piece in shards] == [(1.5, 3, 1.5)] * 2
    usual = CostTable("unit", (BLOCK, PieceCost("head", "head", 4, 6, 3)))
    assert [piece.F for piece in split_vocabulary(usual, 2).pieces[1:]] == [2, 2]


def test_stash_by_hand():
    """The head reads 16 bytes: each of two shards holds them and half of what else is stashed."""
    shards = split_vocabulary(COSTS, 2).pieces[2:]
    assert [piece.stash_bytes for piece in shards] == [16 + 4, 16 + 4]
    assert [piece.grad_stash_bytes for piece in shards] == [16 + 2, 16 + 2]
    small = CostTable("unit", (BLOCK, PieceCost("head", "head", 0, 2, 1, stash_bytes=8, grad_stash_bytes=0)))
    assert [(p.stash_bytes, p.grad_stash_bytes) for p in split_vocabulary(small, 4).pieces[1:]] == [
        (8, 0)
    ] * 4
    embeddings = split_vocabulary(COSTS, 1, 4).pieces[:4]  # they read the batch only
    assert [piece.stash_bytes for piece in embeddings] == [3] * 4


def test_what_shards_hand_on():
    """The hidden state from shard to shard of a head, the sum of rows from shard to shard of an embedding."""
    pieces = split_vocabulary(COSTS, 3, 2).pieces
    assert [piece.output_bytes for piece in pieces] == [16, 16, 16, 16, 16, 2]
