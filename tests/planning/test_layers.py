import pytest

from jaxpipe.costs.table import PieceCost
from jaxpipe.planning.layers import even_layers, layer_starts


def pieces(text):
    """Pieces of names such as `embed layer_00/pre layer_00/mlp head`; others than these two are of kind k."""
    return [PieceCost(n, n if n in ("embed", "head") else "k", 1, 1, 1) for n in text.split()]


@pytest.mark.parametrize(
    ("text", "starts"),
    [
        ("embed layer_00/pre layer_00/core layer_00/post layer_01/mamba layer_02/mlp head", (1, 4, 5, 6)),
        ("embed attention mlp attention_1 mlp_1 head", (1, 2, 3, 4, 5)),
        ("a/x a/y b b/x", (0, 2, 3, 4)),
        ("p0 p1 p2", (0, 1, 2, 3)),
        ("embed head", (1,)),
    ],
)
def test_layers_begin_where_the_first_part_of_the_name_changes(text, starts):
    assert layer_starts(pieces(text)) == starts


def test_every_device_has_as_many_layers_whatever_they_cost():
    line = pieces("embed l0/a l0/b l0/c l1/d l2/a l2/b l2/c l3/d l4/d head")
    assert even_layers(line, 1) == (0, 11)
    assert even_layers(line, 2) == (0, 8, 11)  # 3 layers with the embedding, 2 with the head
    assert even_layers(line, 5) == (0, 4, 5, 8, 9, 11)


def test_more_devices_than_layers():
    message = "^2 layers cannot fill 3 devices; expected a layer for each at least$"
    with pytest.raises(ValueError, match=message):
        even_layers(pieces("embed l0/a l0/b l1/a head"), 3)
