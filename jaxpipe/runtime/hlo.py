"""Compiled HLO as data: computations, their instructions, who calls whom, and where a value comes from."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2} | dict.fromkeys(
    ("s32", "u32", "f32"), 4
)
"""Bytes of an element by HLO's name of the type; those that a training step may hold."""

_HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = ")
_CALLED = re.compile(
    r"\b(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.-]+)"
    r"|\b(branch_computations|called_computations)=\{([^}]*)\}"
)
_SAME = ("bitcast", "reshape", "copy", "copy-start", "copy-done", "optimization-barrier", "opt-barrier")
"""Opcodes whose result is their operand's value."""


class Instruction(NamedTuple):
    """One instruction.

    type: as HLO writes it, without layouts, as in "f32[2,3]" or "(s32[], f32[4])".
    called: (role, computation) in order, as in ("body", "region_1"); branches of a conditional all have
        the role "branch".
    attributes: the rest of the line.
    """

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    called: tuple[tuple[str, str], ...]
    attributes: str


class Place(NamedTuple):
    """An instruction in its computation."""

    computation: str
    instruction: str


@dataclass(frozen=True)
class Module:
    """A compiled program.

    computations: name -> instructions by name, in the order of the schedule.
    roots: name of each computation's result.
    """

    computations: dict[str, dict[str, Instruction]]
    roots: dict[str, str]
    entry: str

    @cached_property
    def callers(self) -> dict[str, Place]:
        """The instruction that calls each computation; the first where there are several."""
        found: dict[str, Place] = {}
        for computation, instructions in self.computations.items():
            for instruction in instructions.values():
                for _, called in instruction.called:
                    found.setdefault(called, Place(computation, instruction.name))
        return found

    def reachable(self, computation: str, through_fusions: bool = True) -> list[str]:
        """The computation and all that it calls, without repetition."""
        found, waiting = {}, [computation]
        while waiting:
            name = waiting.pop()
            if name in found:
                continue
            found[name] = None
            for instruction in self.computations[name].values():
                if through_fusions or instruction.opcode != "fusion":
                    waiting += [called for _, called in instruction.called]
        return list(found)

    def instructions(self, computations: list[str]) -> Iterator[tuple[str, Instruction]]:
        """(computation, instruction) of all of them."""
        for name in computations:
            for instruction in self.computations[name].values():
                yield name, instruction

    def carried_by(self, loop: Place, computation: str, name: str) -> int | None:
        """The element of a loop's carry that a value inside the loop is, or is a later version of.

        A version: updated in place, passed through calls, branches and inner loops, or copied. None for
        values that are computed.
        """
        (body,) = (c for role, c in self._at(loop).called if role == "body")
        return self._carried(body, computation, name, ())

    def _at(self, place: Place) -> Instruction:
        return self.computations[place.computation][place.instruction]

    def _carried(self, body: str, computation: str, name: str, path: tuple[int, ...]) -> int | None:
        """`path`: which element of a nested tuple `name` is meant, outermost first."""
        instruction = self.computations[computation][name]
        opcode, operands = instruction.opcode, instruction.operands

        def follow(where: str, what: str, path: tuple[int, ...] = path) -> int | None:
            return self._carried(body, where, what, path)

        if opcode == "get-tuple-element":
            (index,) = re.findall(r"\bindex=(\d+)", instruction.attributes)
            return follow(computation, operands[0], (int(index), *path))
        if opcode == "tuple":
            return follow(computation, operands[path[0]], path[1:]) if path else None
        if opcode in _SAME or opcode in ("while", "dynamic-update-slice"):
            return follow(computation, operands[0])
        if opcode == "parameter":
            if computation == body:
                return path[0] if path else None
            caller = self.callers.get(computation)
            if caller is None:
                return None
            call = self._at(caller)
            operand = call.operands[_operand_of(call, computation, _number(instruction))]
            return follow(caller.computation, operand)
        if opcode in ("fusion", "call", "conditional"):
            found = (follow(c, self.roots[c]) for _, c in instruction.called)
            return next((index for index in found if index is not None), None)
        return None


def _number(parameter: Instruction) -> int:
    return int(parameter.operands[0])


def _operand_of(call: Instruction, computation: str, parameter: int) -> int:
    """Which operand of a call a parameter of the called computation is."""
    if call.opcode == "while":
        return 0
    if call.opcode == "conditional":
        return 1 + [name for _, name in call.called].index(computation)
    return parameter


def parse(text: str) -> Module:
    """Reads `compiled.as_text()`.

    Raises:
      ValueError: the text has no entry computation.
    """
    computations: dict[str, dict[str, Instruction]] = {}
    roots: dict[str, str] = {}
    entry = current = None
    for line in text.splitlines():
        if not line.startswith(" "):
            header = _HEADER.match(line)
            current = header[2] if header and not line.startswith("HloModule") else None
            if current:
                computations[current] = {}
                entry = current if header[1] else entry
        elif current and (match := _NAME.match(line)):
            instruction = _instruction(match[2], line[match.end() :])
            computations[current][match[2]] = instruction
            if match[1]:
                roots[current] = match[2]
    if entry is None:
        raise ValueError("the text is no HLO module: it has no ENTRY computation")
    return Module(computations, roots, entry)


def _instruction(name: str, text: str) -> Instruction:
    type_end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    kind = _plain_type(text[:type_end])
    opcode, _, _ = text[type_end:].strip().partition("(")
    start = text.index("(", type_end)
    end = _closing(text, start)
    inside, attributes = text[start + 1 : end - 1], text[end:]
    operands = re.findall(r"%([\w.-]+)", inside) or ([inside] if opcode == "parameter" else [])
    called = []
    for role, one, _, several in _CALLED.findall(attributes.partition(", metadata=")[0]):
        if one:
            called.append(("branch" if role.endswith("_computation") else role, one))
        called += [("branch", c) for c in re.findall(r"[\w.-]+", several)]
    return Instruction(name, kind, opcode, tuple(operands), tuple(called), attributes)


def _closing(text: str, start: int) -> int:
    """The position after the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    raise ValueError(f"unbalanced parentheses in HLO: {text[start : start + 80]!r}")


def _plain_type(text: str) -> str:
    return re.sub(r"\{[^}]*\}|/\*[^*]*\*/", "", text)


def tuple_types(kind: str) -> list[str]:
    """The element types of a flat tuple type."""
    return re.findall(r"\w+\[[\d,]*\]", kind)


def element_count(kind: str) -> int:
    """Elements of an array type such as "f32[2,3]"."""
    count = 1
    for size in re.findall(r"\d+", kind.partition("[")[2]):
        count *= int(size)
    return count
