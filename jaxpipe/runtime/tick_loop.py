"""What the compiler made of the tick loop: copies, slices of whole weights, permutes, kernels."""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp

from jaxpipe.models.code import Codes
from jaxpipe.program.program import Signature
from jaxpipe.runtime.hlo import Instruction, Module, Place, element_count, parse, tuple_types
from jaxpipe.runtime.specs import register_types

_NO_KERNEL = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all partition-id "
    "optimization-barrier opt-barrier copy-done async-done async-update collective-permute-done".split()
)
"""Opcodes that launch nothing themselves."""


class OpCode(NamedTuple):
    """The compiled code of one op, loops counted once.

    kernels: instructions that launch something; matmuls: those in them, in libraries or not;
    custom_calls: target of a library's kernel -> their number.
    """

    kernels: int
    matmuls: int
    custom_calls: dict[str, int]


class TickLoop(NamedTuple):
    """Counts of instructions in the loop over ticks and all that it calls.

    copies: type -> copies of a whole carried array of a watched type, as it came or as it is handed on.
    slices, updates: type of a carried array -> reads and writes of as much as a whole weight, at an offset
        that is computed.
    asynchronous, synchronous: permutes that do, and do not, run beside the dispatch.
    ops: in the order of the branches.
    """

    copies: dict[str, int]
    slices: dict[str, int]
    updates: dict[str, int]
    asynchronous: int
    synchronous: int
    ops: tuple[OpCode, ...]


def read_tick_loop(text: str, ops: int, watched: Mapping[str, int | None]) -> TickLoop:
    """Counts in the HLO text of a compiled step.

    Args:
      ops: branches of the dispatch.
      watched: the carried arrays that must not be copied, by type as in "f32[2,3]"; for weights and gradients
        the elements of one parameter, of which the array may hold several, else None.

    Raises:
      ValueError: there is no loop around a `switch` of so many branches, or it does not carry an array of
        each watched type.
    """
    module = parse(text)
    loop, dispatches = _find_loop(module, ops)
    step = module.computations[loop.computation][loop.instruction]
    carry = tuple_types(step.type)
    if absent := sorted(set(watched) - set(carry)):
        raise ValueError(f"the tick loop carries no array of type {', '.join(absent)}")
    (body,) = (c for role, c in step.called if role == "body")
    inside = module.reachable(body)
    copies, slices, updates = Counter(), Counter(), Counter()

    def carried(computation: str, name: str) -> str | None:
        index = module.carried_by(loop, computation, name)
        return carry[index] if index is not None and carry[index] in watched else None

    def handed_on(computation: str) -> tuple[str, ...]:
        root = module.computations[computation][module.roots[computation]]
        return root.operands if root.opcode == "tuple" else ()

    for where, instruction in module.instructions(inside):
        if instruction.opcode in ("copy", "copy-start"):
            kind = carried(where, instruction.operands[0])
            if kind is None and instruction.name in handed_on(where):
                kind = next((k for k in tuple_types(instruction.type)[:1] if k in watched), None)
            copies.update([kind] if kind else [])
        elif instruction.opcode in ("dynamic-slice", "dynamic-update-slice"):
            kind = carried(where, instruction.operands[0])
            reads = instruction.opcode == "dynamic-slice"
            moved = instruction if reads else module.computations[where][instruction.operands[1]]
            if kind and watched[kind] is not None and element_count(moved.type) >= watched[kind]:
                (slices if reads else updates)[kind] += 1
    found = _permutes(module, body, dispatches)
    branches = [c for role, c in dispatches[0].called if role == "branch"]
    return TickLoop(
        dict(copies),
        dict(slices),
        dict(updates),
        sum(found),
        len(found) - sum(found),
        tuple(_op_code(module, branch) for branch in branches),
    )


def _find_loop(module: Module, ops: int) -> tuple[Place, list[Instruction]]:
    """The outermost loop around a dispatch, and the dispatches in it: one for each pattern."""
    for where, instruction in module.instructions(module.reachable(module.entry, through_fusions=False)):
        if instruction.opcode != "while":
            continue
        inside = module.reachable(instruction.name and instruction.called[-1][1], through_fusions=False)
        inner = [i for _, i in module.instructions(inside)]
        dispatches = [i for i in inner if _branches(i) == ops]
        if dispatches:
            return Place(where, instruction.name), dispatches
    raise ValueError(f"the program has no loop around a dispatch over {ops} ops")


def _branches(instruction: Instruction) -> int:
    return sum(role == "branch" for role, _ in instruction.called)


def _permutes(module: Module, body: str, dispatches: list[Instruction]) -> list[bool]:
    """For each permute whether it is asynchronous: started, a dispatch run, only then waited for."""
    names = {d.name for d in dispatches}

    def dispatching(instruction: Instruction) -> bool:
        inside = [c for _, called in instruction.called for c in module.reachable(called, False)]
        return instruction.name in names or any(i.name in names for _, i in module.instructions(inside))

    found = []
    for computation in module.reachable(body, through_fusions=False):
        started: dict[str, bool] = {}
        for instruction in module.computations[computation].values():
            if instruction.opcode == "collective-permute-start":
                started[instruction.name] = False
            elif instruction.opcode == "collective-permute":
                found.append(False)
            elif instruction.opcode == "collective-permute-done":
                start = instruction.operands[0]
                waits = '"is_sync":true' in module.computations[computation][start].attributes
                found.append(started[start] and not waits)
            elif instruction.called and started and dispatching(instruction):
                started = dict.fromkeys(started, True)
    return found


def _op_code(module: Module, branch: str) -> OpCode:
    outside = module.instructions(module.reachable(branch, through_fusions=False))
    kernels = sum(i.opcode not in _NO_KERNEL for _, i in outside)
    every = [i for _, i in module.instructions(module.reachable(branch))]
    # A library's kernel may stand in a fusion that only computes its operands' addresses.
    targets = Counter(_target(i) for i in every if i.opcode == "custom-call")
    library = sum(n for target, n in targets.items() if "matmul" in target or "gemm" in target)
    return OpCode(kernels, library + sum(i.opcode == "dot" for i in every), dict(targets))


def _target(call: Instruction) -> str:
    return call.attributes.partition('custom_call_target="')[2].partition('"')[0]


def watched_types(codes: Codes, signature: Signature) -> dict[str, int | None]:
    """The arrays in the tick loop that must not be copied, as `read_tick_loop` takes them.

    Register files, weights as the ops read them and gradients, where they hold a matrix or more.
    """
    types, travels = register_types(codes), {c.register_class for c in signature.channels}
    watched = {}
    for name, count in signature.registers:
        for t in types[name]:
            watched[_hlo_type((count + (name in travels), *t.shape), t.dtype)] = None
    stacked, slots = {op.kind for op in signature.ops if op.slot is None}, dict(signature.slots)
    for (kind, _), code in codes.items():
        for t in code.group("param").values():
            if len(t.shape) < 2:
                continue
            shape = (slots[kind], *t.shape) if kind in stacked else t.shape
            for dtype in (t.dtype, jnp.float32):
                watched[_hlo_type(shape, dtype)] = t.size
    return watched


def _hlo_type(shape, dtype) -> str:
    names = {"float32": "f32", "bfloat16": "bf16", "int32": "s32", "bool": "pred"}
    return f"{names[jnp.dtype(dtype).name]}[{','.join(map(str, shape))}]"
