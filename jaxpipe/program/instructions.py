"""Actions of a plan spelled out as instructions on named values (tokens)."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from jaxpipe.planning.plan import Plan
from jaxpipe.program.spec import Operand, PieceSpec, operands, register_class

Name = tuple[str, int, str]
"""A token of any micro-batch: (what, piece, value)."""

Token = tuple[str, int, str, int]
"""One array, or bundle of arrays, of one micro-batch: (what, piece, value, micro-batch).

what: "value" written by the piece, "cotangent" of a value as summed by its readers from the last
one down to this piece, "residuals" of its forward, "stash" from its I to its W.
"""


Readers = dict[tuple[int, str], int]
"""(piece, value) -> the piece that reads the value: first after the writer, or next after a reader."""


class Form(NamedTuple):
    """One phase of one piece for any micro-batch; operands in the order of the piece's phase.

    kept: values that the piece reads and later pieces read too (only in a phase that sums cotangents).
    """

    piece: int
    phase: str
    kept: tuple[str, ...]
    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]


class Instruction(NamedTuple):
    """One phase of one piece for one micro-batch."""

    form: Form
    microbatch: int
    inputs: tuple[Token, ...]
    outputs: tuple[Token, ...]


Rows = Sequence[Sequence[Sequence[Instruction]]]
"""For each device, the instructions of each tick in which it computes."""


def forms(pieces: Sequence[PieceSpec]) -> dict[tuple[int, str], Form]:
    """(piece, phase) -> its form, for every phase in which the piece has something to do.

    The cotangent of a value with several readers is summed as a chain: the last reader hands its own to
    the reader before it, which adds its own, and so on; the writer takes the sum of its first reader.
    """
    readers = defaultdict(list)
    for i, spec in enumerate(pieces):
        for name, producer in spec.reads.items():
            readers[producer, name].append(i)
    first = {key: found[0] for key, found in readers.items()}
    later = {(i, name): j for (_, name), found in readers.items() for i, j in pairwise(found)}
    result = {}
    for i, spec in enumerate(pieces):
        chained = tuple(n for n in spec.reads if (i, n) in later)
        for phase in spec.phases:
            kept = chained if phase in "BI" else ()
            both = [[_name(spec, i, o, first, later) for o in side] for side in operands(spec, phase, kept)]
            result[i, phase] = Form(i, phase, kept, *map(tuple, both))
    return result


def _name(spec: PieceSpec, i: int, operand: Operand, first: Readers, later: Readers) -> Name:
    """The name of an operand of piece i."""
    what, value = operand
    match what:
        case "read":
            return "value", spec.reads[value], value
        case "write":
            return "value", i, value
        case "ct_write":
            return "cotangent", first[i, value], value
        case "kept":
            return "cotangent", later[i, value], value
        case "ct_read":
            return "cotangent", i, value
    return what, i, value


def instruction(form: Form, microbatch: int) -> Instruction:
    """The form for one micro-batch."""
    inputs = tuple((*name, microbatch) for name in form.inputs)
    return Instruction(form, microbatch, inputs, tuple((*name, microbatch) for name in form.outputs))


def token_class(pieces: Sequence[PieceSpec], token: Token) -> str:
    """The register class that holds a token."""
    what, piece, value, _ = token
    return register_class(pieces[piece], (what, value))


def expand(plan: Plan, pieces: Sequence[PieceSpec]) -> list[list[list[Instruction]]]:
    """For each device and action of the plan: the action's instructions in order.

    Actions in which no piece has anything to do (W of stages without parameters, say) are left out.
    """
    known, rows = forms(pieces), []
    for row in plan.schedule:
        actions = []
        for stage, phase, microbatch in row:
            order = plan.stage_pieces(stage)
            order = order if phase == "F" else reversed(order)
            found = [known[i, phase] for i in order if (i, phase) in known]
            if found:
                actions.append([instruction(form, microbatch) for form in found])
        rows.append(actions)
    return rows
