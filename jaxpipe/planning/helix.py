"""HelixPipe: the attention of different micro-batches on different devices at the same time.

Zhang et al. 2025 (arXiv 2507.00394). The model is cut before and after every attention core. Block l, what
lies between the cores of layers l - 1 and l, lives on device l mod p. A core has no parameters, so its
micro-batches may run anywhere: on p devices at once, while block l hands over one micro-batch after the
other. Neither the length of the attention nor the number of layers shows in the bubble then.

Stages of a model with L attention cores: 2l is block l (the first with the embedding, the last with the
head), 2l + 1 the core of layer l.
"""

from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import NamedTuple

from jaxpipe.costs.table import CostTable
from jaxpipe.planning.plan import Action, Schedule
from jaxpipe.planning.stages import CORE


def helix(layers: int, devices: int, microbatches: int, fold: int) -> Schedule:
    """All forwards, then all backwards as their mirror image: first in, last out.

    Micro-batches move in units of `fold`: one (naive), or two (two-fold), of which one computes while the
    other communicates. A round has one unit for each device; its unit j runs the core of layer l on
    device (l + j + 1) mod p. Rounds follow each other without a gap where p divides the layers.

    Bubble (makespan minus busy time) with p devices, backward twice the forward (embedding and head free, no
    communication, p divides the layers): naive 3(p-1)(pre+post), two-fold 6(p-1)(pre+post) where a unit
    moves as one and a little less where it does not; with recompute without attention 4 and 8 in place
    of 3 and 6. pre and post: forward of a block's two parts.

    Activations: all m micro-batches of L/p layers on every device, in the paper's count 16bsh m L/p, with
    recompute without attention 4bsh m L/p.

    Two-fold needs sends that do not wait: while a device hands over one micro-batch of a pair it must go on
    with the other, so with the simulator's rendezvous sends it deadlocks. (The executor's ticks cannot.)

    fold: micro-batches in a unit; `microbatches` is a multiple of fold * devices.
    """
    timed: list[list[tuple[int, Action]]] = [[] for _ in range(devices)]
    for microbatch in range(microbatches):
        start, place = divmod(microbatch // fold, devices)
        for stage in range(2 * layers + 1):
            layer, is_core = divmod(stage, 2)
            device = (layer + is_core * (place + 1)) % devices
            # Where blocks and cores take one unit of time each, devices never wait once they have begun.
            clock = 2 * layers * start + place + stage
            timed[device].append((clock, Action(stage, "F", microbatch)))
    rows = []
    for row in timed:
        forwards = [action for _, action in sorted(row, key=lambda entry: (entry[0], entry[1].microbatch))]
        rows.append((*forwards, *(action._replace(phase="B") for action in reversed(forwards))))
    return tuple(rows)


class Layout(NamedTuple):
    """Partition and placement of a Helix plan.

    layers: attention cores.
    bounds, stage_to_device: as in a plan; of a core's stage, the device of its first micro-batches.
    floating: the stages of the cores, whose micro-batches stand on several devices.
    """

    layers: int
    bounds: tuple[int, ...]
    stage_to_device: tuple[int, ...]
    floating: tuple[int, ...]


def layout(costs: CostTable, devices: int) -> Layout:
    """Cuts a model around its attention cores; other pieces, such as Mamba-2 blocks, belong to the blocks.

    Raises:
      ValueError: there is no attention core, or none where blocks need it.
    """
    cores = attention_cores(costs)
    bounds = (0, *(bound for core in cores for bound in (core, core + 1)), len(costs.pieces))
    for low, high in pairwise(bounds):
        if low == high:
            raise ValueError(
                f"no piece stands before piece {low} of {len(costs.pieces)}, at an attention core; HelixPipe "
                "needs other pieces before, between and after the cores"
            )
    stages = range(len(bounds) - 1)
    homes = tuple((stage // 2 + stage % 2) % devices for stage in stages)
    return Layout(len(cores), bounds, homes, tuple(stages[1::2]))


def attention_cores(costs: CostTable) -> tuple[int, ...]:
    """Indices of the pieces of kind CORE.

    Raises:
      ValueError: there are none, or one has parameters, which would tie it to a device.
    """
    cores = tuple(i for i, piece in enumerate(costs.pieces) if piece.kind == CORE)
    if not cores:
        kinds = ", ".join(dict.fromkeys(piece.kind for piece in costs.pieces))
        raise ValueError(
            f"HelixPipe needs attention apart from the rest of a layer: pieces of kind {CORE!r}; "
            f"the cost table has kinds {kinds}"
        )
    for piece in (costs.pieces[i] for i in cores):
        if piece.param_bytes:
            raise ValueError(
                f"piece {piece.name!r} of kind {CORE!r} has param_bytes {piece.param_bytes}; expected 0, "
                "since HelixPipe runs it on every device"
            )
    return cores


def recompute_without_attention(costs: CostTable) -> tuple[str, ...]:
    """Policies that compute every forward again but that of the attention cores."""
    return tuple("none" if piece.kind == CORE else "full" for piece in costs.pieces)


class Condition(NamedTuple):
    """Where messages are hidden worst. Times in the unit of the cost table.

    core: name of the attention core with the least forward for its messages.
    attention: its forward.
    message: the longer of its two messages, from the block before it and to the one behind.
    block: the shortest forward between two cores; infinite where there is one core.
    """

    core: str
    attention: float
    message: float
    block: float


def tightest(costs: CostTable) -> Condition:
    """The figures behind `condition`.

    Raises:
      ValueError: as `attention_cores`.
    """
    cores, pieces = attention_cores(costs), costs.pieces
    messages = [costs.link.time(max(p.output_bytes for p in pieces[max(i - 1, 0) : i + 1])) for i in cores]
    core, message = min(zip(cores, messages), key=lambda pair: pieces[pair[0]].F - pair[1])
    blocks = [sum(piece.F for piece in pieces[low + 1 : high]) for low, high in pairwise(cores)]
    return Condition(pieces[core].name, pieces[core].F, message, min(blocks, default=inf))


def condition(costs: CostTable) -> str:
    """One line: HelixPipe can hide a message where attention takes longer, and whether that holds here.

    Whether it then is the fastest depends on the bubble that it saves, which the simulation tells.

    Naive, every message lengthens the step. Two-fold, the other micro-batch of the pair hides them, in the
    simulation up to the length of attention or of a block, whichever is less; so the line names both.

    Raises:
      ValueError: as `attention_cores`.
    """
    core, attention, message, block = tightest(costs)
    sign, verdict = (">=", "holds") if attention >= message else ("<", "does not hold")
    between = f"; two-fold hides messages up to t_block = {block:.3g} {costs.unit}" if block < inf else ""
    return (
        f"HelixPipe needs t_attention >= t_message to hide its messages, which {verdict}: {attention:.3g} "
        f"{sign} {message:.3g} {costs.unit} (forward of {core}){between}"
    )


def messages_as_published(costs: CostTable) -> CostTable:
    """The table with as many bytes before every core as behind it.

    With full multi-head attention q, k, v and the residual stream are 4bsh, o and the stream 2bsh. The paper
    sends 2bsh before a core too: the input of the projections, which the core's device then does,
    and the stream (the projections' weight travels along, here as in the paper's figures not counted).

    Raises:
      ValueError: as `attention_cores`.
    """
    pieces = list(costs.pieces)
    for i in attention_cores(costs):
        if i:
            pieces[i - 1] = replace(pieces[i - 1], output_bytes=pieces[i].output_bytes)
    return replace(costs, pieces=tuple(pieces))
