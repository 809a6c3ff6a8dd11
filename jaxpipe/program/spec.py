"""What the lowering knows of a piece: names and classes, no arrays."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PhaseSpec:
    """What one phase of a piece reads and writes, in the order of its operands.

    reads, writes: values of the forward that it looks at.
    residuals: whether it reads (B, I, W) or leaves (F) the residual bundle.
    stash: whether it leaves (I) or reads (W) the bundle between I and W.
    cotangents: written values whose cotangents it looks at.
    """

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    residuals: bool = False
    stash: bool = False
    cotangents: tuple[str, ...] = ()


@dataclass(frozen=True)
class PieceSpec:
    """One piece as the lowering sees it.

    name: the piece's name.
    kind: pieces of one kind share code and parameter shapes.
    policy: "none", "full" or "forward" (see models/backward.py); part of the code's identity.
    has_params: whether it has parameters; pieces without share one slot.
    reads: value read -> index of the piece that writes it.
    writes: names of the values it writes.
    classes: value name -> register class; cotangents live in the class of their value.
    phases: phase letter -> what it touches. A phase that is not there has nothing to do.
    residual_class, stash_class: register classes of its bundles; empty where it has none.
    bytes: register class of a value -> bytes of one register; messages of other classes take no time but the
        link's latency.
    """

    name: str
    kind: str
    policy: str
    has_params: bool
    reads: dict[str, int]
    writes: tuple[str, ...]
    classes: dict[str, str]
    phases: dict[str, PhaseSpec] = field(default_factory=dict)
    residual_class: str = ""
    stash_class: str = ""
    bytes: dict[str, int] = field(default_factory=dict)


Operand = tuple[str, str]
"""("read", value) or ("write", value) of the forward, ("ct_write", value) or ("ct_read", value) of the
backward, ("kept", value) for the later readers' sum of cotangents, ("residuals", "") or ("stash", "")."""


def operands(spec: PieceSpec, phase: str, kept: tuple[str, ...]) -> tuple[list[Operand], list[Operand]]:
    """Inputs and outputs of an instruction, in the order of the operand table."""
    touched = spec.phases[phase]
    inputs = [("read", n) for n in touched.reads]
    writes = [("write", n) for n in touched.writes]
    residuals = [("residuals", "")] * touched.residuals
    stash = [("stash", "")] * touched.stash
    if phase == "F":
        return inputs, writes + residuals
    inputs += writes + residuals + [("ct_write", n) for n in touched.cotangents]
    if phase == "W":
        return inputs + stash, []
    return inputs + [("kept", n) for n in kept], [("ct_read", n) for n in spec.reads] + stash


def register_class(spec: PieceSpec, operand: Operand) -> str:
    """The register class of an operand."""
    what, name = operand
    if what == "residuals":
        return spec.residual_class
    return spec.stash_class if what == "stash" else spec.classes[name]
