"""Layouts of Megatron-LM: which layers each stage holds.

A layout string (`--pipeline-model-parallel-layout`) names the layers of the model in order: E embedding,
t decoder layer, m multi-token prediction, L loss. A | parts two stages, x*N and (xy|)*N repeat, commas
only help the eye. So "Et*3|(tt|)*29,m|L" has 32 stages. Stage s is on device s modulo the number of
devices, as its virtual rank s // devices.

Rules from megatron/core/transformer/pipeline_parallel_layer_layout.py of NVIDIA/Megatron-LM.
"""

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise

LAYERS = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
"""The letters of layout strings."""

MOST_LAYERS = 100_000
"""Longer layouts are taken for a mistake."""

Layout = tuple[tuple[str, ...], ...]
"""For each stage the names of its layers, values of LAYERS."""

_ITEM = re.compile(
    r"\((?P<group>[^()]*)\)\*(?P<times>\d+)|(?P<layer>[EtmL|])(?:\*(?P<count>\d+))?|,", re.ASCII
)


def parse_layout(text: str, devices: int, layers: int | None = None) -> Layout:
    """The stages of a layout string.

    layers: number of decoder layers of the model; not looked at if None.

    Raises:
      ValueError: naming the character that does not belong there, or as `check_layout`.
    """
    layout = tuple(
        tuple(LAYERS[letter] for letter in stage) for stage in "".join(_letters(text, 0, text)).split("|")
    )
    check_layout(layout, devices, layers)
    return layout


def _letters(text: str, offset: int, whole: str) -> list[str]:
    """The letters and bars of a layout string (or what stands in its parentheses), repeated as they say."""
    parts, position = [], 0
    while position < len(text):
        match = _ITEM.match(text, position)
        if not match:
            raise ValueError(
                f"layout {whole!r}: {text[position]!r} at character {offset + position + 1}; expected one of "
                f"{' '.join(LAYERS)} | or (...)*N, each letter with or without *N"
            )
        if match["group"] is not None:
            part, times = (
                "".join(_letters(match["group"], offset + match.start("group"), whole)),
                match["times"],
            )
        else:
            part, times = match["layer"] or "", match["count"] or "1"
        if len(times) > 6 or sum(map(len, parts)) + len(part) * int(times) > MOST_LAYERS:
            raise ValueError(f"layout {whole!r} has more than {MOST_LAYERS} layers")
        parts.append(part * int(times))
        position = match.end()
    return parts


def check_layout(layout: Sequence[Sequence[str]], devices: int, layers: int | None = None) -> None:
    """Proves that Megatron takes a layout.

    The embedding is first and there once; the loss is last and there once, or once more than there are
    layers of multi-token prediction; these come after the decoder, in the last stage of their device.

    Raises:
      ValueError: naming what is wrong and what would be right.
    """
    if devices < 1:
        raise ValueError(f"devices is {devices}; expected at least 1")
    if not layout or len(layout) % devices:
        raise ValueError(f"the layout has {len(layout)} stages; expected a multiple of the {devices} devices")
    for stage, names in enumerate(layout):
        for name in names:
            if name not in LAYERS.values():
                raise ValueError(
                    f"stage {stage} holds {name!r}; expected one of {', '.join(LAYERS.values())}"
                )
    line = [name for names in layout for name in names]
    count = {name: line.count(name) for name in LAYERS.values()}
    if not line or line[0] != "embedding" or count["embedding"] != 1:
        raise ValueError(f"the layout has {count['embedding']} embeddings; expected one, as its first layer")
    if line[-1] != "loss" or count["loss"] not in (1, 1 + count["mtp"]):
        raise ValueError(
            f"the layout has {count['loss']} losses; expected one, as its last layer, "
            "or one more than mtp layers"
        )
    if layers is not None and count["decoder"] != layers:
        raise ValueError(f"the layout has {count['decoder']} decoder layers; the model has {layers}")
    if count["mtp"] and "decoder" in line[line.index("mtp") :]:
        raise ValueError("the layout has a decoder layer after an mtp layer; expected all of them before")
    for stage, names in enumerate(layout[: len(layout) - devices]):
        if "mtp" in names:
            raise ValueError(f"stage {stage} holds an mtp layer; expected them in the last {devices} stages")


def layer_numbers(layout: Layout, devices: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The decoder layers, from 1, by device and by virtual rank."""
    counts = [names.count("decoder") for names in layout]
    ends = list(accumulate(counts))
    numbers = [tuple(range(end - count + 1, end + 1)) for count, end in zip(counts, ends)]
    return tuple(tuple(numbers[device::devices]) for device in range(devices))


def automatic_layout(
    layers: int,
    devices: int,
    chunks: int = 1,
    first_layers: int | None = None,
    last_layers: int | None = None,
    count_embedding: bool = False,
    count_loss: bool = False,
) -> Layout:
    """The layout that Megatron makes without a string: equally many layers on every device.

    chunks: stages of a device, which share its layers equally.
    first_layers, last_layers: decoder layers of the first and last device; the others share the rest.
    count_embedding, count_loss: the embedding (loss) counts as a layer of the first (last) device.

    Raises:
      ValueError: when something does not divide, and for numbers on a device together with counting.
    """
    own = (first_layers, last_layers)
    if own != (None, None) and (count_embedding or count_loss):
        raise ValueError("layers of the first or last device are given; embedding and loss cannot count then")
    rest = layers + count_embedding + count_loss - sum(number or 0 for number in own)
    sharing = devices - sum(number is not None for number in own)
    each = _share(rest, sharing, "devices") if sharing or rest else 0
    by_device = [each] * devices
    if first_layers is not None:
        by_device[0] = first_layers
    if last_layers is not None:
        by_device[-1] = last_layers
    by_chunk = [_share(number, chunks, "stages of a device") for number in by_device]
    counts = [by_chunk[stage % devices] for stage in range(devices * chunks)]
    counts[0] -= count_embedding
    counts[-1] -= count_loss
    layout = [("decoder",) * count for count in counts]
    layout[0] = ("embedding", *layout[0])
    layout[-1] = (*layout[-1], "loss")
    return tuple(layout)


def _share(layers: int, parts: int, what: str) -> int:
    if parts < 1 or layers < 0 or layers % parts:
        raise ValueError(f"{layers} layers cannot be shared equally by {parts} {what}")
    return layers // parts


def stage_bounds(layout: Layout, pieces: Sequence[int]) -> tuple[int, ...]:
    """The `stage_bounds` of a plan with these stages.

    pieces: how many pieces each layer of the layout has, in order: embedding, decoder layers, and so on.

    Raises:
      ValueError: when there are not as many layers, and for a stage without pieces, which no plan has.
    """
    layers = sum(map(len, layout))
    if len(pieces) != layers:
        raise ValueError(f"pieces are given for {len(pieces)} layers; the layout has {layers}")
    ends = [0, *accumulate(pieces)]
    bounds = tuple(ends[number] for number in accumulate(map(len, layout), initial=0))
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        if stop <= start:
            raise ValueError(f"stage {stage} of the layout holds no piece; a plan's stages hold at least one")
    return bounds
