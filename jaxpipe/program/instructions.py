"""Actions of a plan spelled out as instructions on named values (tokens)."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxpipe.planning.plan import Plan
from jaxpipe.program.spec import Operand, PieceSpec, kept_reads, next_reader, operands, register_class

Token = tuple[str, int, str, int]
"""One array, or bundle of arrays, of one micro-batch: (what, piece, value, micro-batch).

what: "value" written by the piece, "cotangent" of a value as summed by its readers from the last
one down to this piece, "residuals" of its forward, "stash" from its I to its W.
"""


class Instruction(NamedTuple):
    """One phase of one piece for one micro-batch; operands in the order of the piece's phase."""

    piece: int
    phase: str
    microbatch: int
    inputs: tuple[Token, ...]
    outputs: tuple[Token, ...]


def instruction(pieces: Sequence[PieceSpec], i: int, phase: str, microbatch: int) -> Instruction | None:
    """The instruction of a phase, or None when the piece has nothing to do in it."""
    spec = pieces[i]
    if phase not in spec.phases:
        return None
    later = dict(kept_reads(pieces, i))
    inputs, outputs = operands(spec, phase, tuple(later))

    def token(operand: Operand) -> Token:
        what, name = operand
        what, owner = {
            "read": ("value", spec.reads.get(name)),
            "write": ("value", i),
            "ct_write": ("cotangent", next_reader(pieces, i, name, i)),
            "kept": ("cotangent", later.get(name)),
            "ct_read": ("cotangent", i),
        }.get(what, (what, i))
        return what, owner, name, microbatch

    return Instruction(i, phase, microbatch, tuple(map(token, inputs)), tuple(map(token, outputs)))


def token_class(pieces: Sequence[PieceSpec], token: Token) -> str:
    """The register class that holds a token."""
    what, piece, value, _ = token
    return register_class(pieces[piece], (what, value))


def expand(plan: Plan, pieces: Sequence[PieceSpec]) -> list[list[list[Instruction]]]:
    """For each device and action of the plan: the action's instructions in order."""
    rows = []
    for row in plan.schedule:
        actions = []
        for stage, phase, microbatch in row:
            order = plan.stage_pieces(stage)
            order = order if phase == "F" else reversed(order)
            found = (instruction(pieces, i, phase, microbatch) for i in order)
            actions.append([x for x in found if x is not None])
        rows.append(actions)
    return rows
