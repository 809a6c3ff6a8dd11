"""The 18 planning problems of OctoPipe (arXiv 2509.23722) that throughput was published for.

Three models in three sizes, with sequences of 2,048 and 4,096 tokens. Costs are the published ratios of the
times of layers of two types and of the head; the embedding takes no time and messages none. A layer holds 2
units of memory from the start of F, of which I frees one and W the other; embedding and head hold none, as
nothing is published about them. Parameters take no memory.
"""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from jaxpipe.costs.table import CostTable, PieceCost
from jaxpipe.planning.layers import EMBEDDING, HEAD
from jaxpipe.planning.simulator import lower_bound

FILE = Path(__file__).parents[2] / "tests" / "data" / "octopipe_published.json"
MODELS = {"Gemma": ("GEMMA", "1536"), "DeepSeek": ("DEEPSEEK", "2048"), "Nemotron-H": ("NEMOTRONH", "1024")}
"""Key and hidden size of each model's ratios."""
SIZES = ("Small", "Medium", "Large")
LENGTHS = (2048, 4096)
LAYERS = {"Gemma": (32, 64, 128), "DeepSeek": (16, 32, 64), "Nemotron-H": (28, 56, 112)}
DEVICES = {"Gemma": (4, 8, 16), "DeepSeek": (4, 8, 8), "Nemotron-H": (4, 8, 16)}
VOCABULARIES = {
    "Gemma": (256_000, 512_000, 1_024_000),
    "DeepSeek": (131_072, 262_144, 524_288),
    "Nemotron-H": (131_072, 262_144, 524_288),
}
"""By size, as LAYERS and DEVICES."""
ROUNDS = 4
"""Micro-batches a device."""
STASH, GRAD_STASH = 2, 1
"""Memory of a layer from the start of F to the end of I, and from there to the end of W."""


class Cell(NamedTuple):
    """One problem."""

    model: str
    size: str
    length: int

    @property
    def scale(self) -> int:
        """0, 1, 2 for small, medium, large."""
        return SIZES.index(self.size)

    @property
    def devices(self) -> int:
        """Devices of the pipeline."""
        return DEVICES[self.model][self.scale]

    @property
    def microbatches(self) -> int:
        """Micro-batches of a step."""
        return ROUNDS * self.devices

    def __str__(self) -> str:
        return f"{self.model} {self.size} {self.length // 1024}k"


@functools.cache
def published() -> dict:
    """The published figures as they are."""
    return json.loads(FILE.read_text())


def cells() -> tuple[Cell, ...]:
    """All 18."""
    return tuple(Cell(model, size, length) for model in MODELS for size in SIZES for length in LENGTHS)


def cell_costs(cell: Cell) -> CostTable:
    """The costs of a cell, without a memory limit."""
    key, hidden = MODELS[cell.model]
    vocabulary = str(VOCABULARIES[cell.model][cell.scale])
    ratios = published()["profiled_cost_ratios"][key][hidden][str(cell.length)][vocabulary]
    pieces = [PieceCost(EMBEDDING, EMBEDDING, 0.0, 0.0, 0.0)]
    for number in range(LAYERS[cell.model][cell.scale]):
        first = 0 if _is_first_type(cell, number) else 3
        name, times = f"layer_{number:03}", ratios[first : first + 3]
        pieces.append(PieceCost(name, "layer", *times, stash_bytes=STASH, grad_stash_bytes=GRAD_STASH))
    pieces.append(PieceCost(HEAD, HEAD, *ratios[6:]))
    return CostTable("unit", tuple(pieces))


def _is_first_type(cell: Cell, layer: int) -> bool:
    """Gemma's layers are alike; DeepSeek's first ones are dense; few of Nemotron-H's are attention."""
    factor = 2**cell.scale
    if cell.model == "DeepSeek":
        return layer < factor
    return cell.model == "Gemma" or (layer + 1) % (3 * factor) == 0


def measured_gain(cell: Cell) -> float:
    """The published throughput of OctoPipe over that of S-1F1B, measured on H200s."""
    row = published()["h200_data"][cell.model][f"Seq_{cell.length // 1024}k"][cell.size]
    return row["OctoPipe"] / row["S-1F1B"]


class Bounds(NamedTuple):
    """Makespans that no plan is below.

    whole: with the head on one device.
    filled: the same and with fill and drain of the head's device, which is at least as much.
    split: with a head in as many shards as one likes.
    """

    whole: float
    filled: float
    split: float


def bounds(costs: CostTable, devices: int, microbatches: int) -> Bounds:
    """The bounds of a model whose last piece is its head, messages neglected."""
    *before, head = costs.pieces
    whole = lower_bound(costs, devices, microbatches)
    # The head's first F waits for one micro-batch's way down, and all F and I of the head come before the
    # last one's way up. What the device has of W may run on that way.
    down, up = sum(piece.F for piece in before), sum(piece.I for piece in before)
    filled = down + microbatches * (head.F + head.I) + max(microbatches * head.W, up)
    even = microbatches * sum(piece.total for piece in costs.pieces) / devices
    headless = lower_bound(replace(costs, pieces=tuple(before)), devices, microbatches)
    return Bounds(whole, max(whole, filled), max(even, headless))
