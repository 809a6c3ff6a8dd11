"""Device memory of a training step, part by part, before it is compiled."""

from collections.abc import Mapping
from math import prod

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpipe.costs.chips import CHIPS
from jaxpipe.models.code import AXES, Codes
from jaxpipe.program.program import Op, Signature
from jaxpipe.program.spec import PieceSpec, operands, register_class
from jaxpipe.runtime.executor import run_program
from jaxpipe.runtime.layout import slot_key
from jaxpipe.runtime.specs import register_types

GIB = 2**30


def local_bytes(tree) -> int:
    """Bytes on one device of arrays or types; those without a sharding are whole on every device."""
    leaves = jax.tree.leaves(tree)
    shapes = [v.sharding.shard_shape(v.shape) if hasattr(v, "sharding") else v.shape for v in leaves]
    return sum(prod(shape) * v.dtype.itemsize for shape, v in zip(shapes, leaves))


def predicted_bytes(codes: Codes, signature: Signature, params, optimizer, inputs, dtype) -> dict[str, int]:
    """Bytes on one device by part, all but the workspace of the ops; slots and registers padded as compiled.

    Args:
      params: slot tree of the master parameters (types with shardings); optimizer: its state.
      inputs: the step's other arguments, likewise.
      dtype: of the compute copies.
    """
    stacked = {op.kind for op in signature.ops if op.slot is None}
    copies = 0
    for key, own in params.items():
        for leaf in jax.tree.leaves(own):
            cast = leaf.ndim > 2 and jnp.dtype(dtype) != leaf.dtype
            if cast or key.rsplit(":", 1)[0] in stacked:
                copies += (
                    local_bytes(leaf)
                    // leaf.dtype.itemsize
                    * (jnp.dtype(dtype) if cast else leaf.dtype).itemsize
                )
    types, travels = register_types(codes), {c.register_class for c in signature.channels}
    sizes = {name: sum(prod(t.shape) * t.dtype.itemsize for t in own) for name, own in types.items()}
    sent = [
        sum(sizes[c.register_class] for c, senders in zip(signature.channels, pattern) if senders)
        for pattern in signature.patterns
    ]
    return {
        "master parameters": local_bytes(params),
        "optimizer state": local_bytes(optimizer),
        "gradients": local_bytes(params),
        "compute copies": copies,
        "registers": sum(sizes[name] * (count + (name in travels)) for name, count in signature.registers),
        "messages on their way": 2 * max(sent),  # one buffer is read, another written
        "batch and tables": local_bytes(inputs),
    }


def check_fits(parts: Mapping[str, int], chip: str) -> None:
    """Raises ValueError, saying by how much and what is largest, when the parts exceed the chip's memory.

    Parts without "workspace" are those of a step whose ops have not been compiled.
    """
    limit, total = CHIPS[chip].memory_bytes, sum(parts.values())
    if limit is None or total <= limit:
        return
    largest = max(parts, key=parts.get)
    known = "with" if "workspace" in parts else "without"
    raise ValueError(
        f"the step needs {total / GIB:.1f} GiB a device, {known} the workspace of its ops, "
        f"{(total - limit) / GIB:.1f} GiB more than the {limit / GIB:.1f} GiB of chip {chip!r}; "
        f"its largest part: {largest}, {parts[largest] / GIB:.1f} GiB"
    )


def distinct_ops(signature: Signature) -> list[Op]:
    """One op of each kind, policy and phase."""
    found = {}
    for op in signature.ops:
        found.setdefault((op.kind, op.policy, op.phase, op.kept), op)
    return list(found.values())


def op_workspace(mesh: Mesh, codes: Codes, spec: PieceSpec, op: Op, compiler_options: dict) -> int:
    """Bytes that one op needs on a device beside the arrays it reads and writes.

    Compiles the program of this one op, with few registers, for the mesh's devices, which need not exist.

    Args:
      spec: any piece of the op's kind and policy.
    """
    code = codes[op.kind, op.policy]
    inputs, outputs = operands(spec, op.phase, op.kept)
    registers = sorted({register_class(spec, operand) for operand in (*inputs, *outputs)})
    few = 2  # one would let the compiler drop what picks it
    signature = Signature(
        devices=mesh.shape["stage"],
        microbatches=few,
        ops=(op,),
        slots=((op.kind, few if op.slot is None else 1),) if spec.has_params else (),
        registers=tuple((name, few) for name in registers),
        channels=(),
        patterns=((),),
        ticks=few,
        instructions=few,
        operands=len(inputs) + len(outputs),
    )
    leaves = list(code.group("param").values())
    if op.slot is None:
        params = {op.kind: [_type((few, *t.shape), t.dtype) for t in leaves]}
    else:
        params = {slot_key(op.kind, op.slot): [_type(t.shape, t.dtype) for t in leaves]} if leaves else {}
    batch = {n: _type((few, *t.shape), t.dtype) for n, t in code.group("batch").items()}
    tables = dict.fromkeys(
        ("first", "count", "op", "microbatch", "slot", "pattern"), _type((few,), jnp.int32)
    )
    tables["operands"] = _type((few, signature.operands), jnp.int32)
    scales = {n: _type((), jnp.float32) for own in codes.values() for n in own.group("loss")}

    def body(params, batch, tables, scales, length):
        local = jax.tree.map(lambda v: v[0], (params, batch, tables, scales))
        state = run_program(codes, (spec,), signature, *local[:3], length, local[3])
        return jax.tree.map(lambda v: v[None], state)

    spread = PartitionSpec(AXES)
    step = jax.shard_map(body, mesh=mesh, in_specs=(*[spread] * 4, PartitionSpec()), out_specs=spread)
    count = mesh.devices.size
    arguments = jax.tree.map(
        lambda t: _type((count, *t.shape), t.dtype, NamedSharding(mesh, spread)),
        (params, batch, tables, scales),
    )
    length = _type((), jnp.int32, NamedSharding(mesh, PartitionSpec()))
    with jax.set_mesh(mesh):
        lowered = jax.jit(step).lower(*arguments, length)
    used = lowered.compile(compiler_options=compiler_options).memory_analysis()
    held = sum(prod(t.shape) * t.dtype.itemsize for t in jax.tree.leaves(lowered.out_info)) // count
    return used.temp_size_in_bytes + used.output_size_in_bytes - held


def _type(shape, dtype, sharding=None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
