"""Plans of a small model on a compiled step that they share, beside the sequential model.

Shape letters: M micro-batches, B sequences in a micro-batch, S tokens in a sequence.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxpipe.models.code import Codes, trace_model
from jaxpipe.models.families import FAMILIES
from jaxpipe.models.piece import Model, apply_model, init_params
from jaxpipe.planning.plan import Plan
from jaxpipe.program.program import Program, fit, lower, union
from jaxpipe.program.verify import verify
from jaxpipe.runtime.compiler import compiler_options
from jaxpipe.runtime.executor import make_step, program_arguments
from jaxpipe.runtime.layout import from_slots, make_layout, to_slots
from jaxpipe.runtime.specs import piece_specs

VOCAB = 64
SIZES = {
    "llama": {"layers": 2, "mlp_hidden": 32},
    "nemotron_h": {
        "pattern": "M-*M-",
        "mlp_hidden": 32,
        "mamba_heads": 4,
        "mamba_head_dim": 8,
        "mamba_groups": 2,
        "mamba_state": 8,
        "chunk": 8,
    },
}
"""Models of 10 and 9 pieces, small because compiling is what costs."""


def small_model(family: str, tp: int = 1, dtype=jnp.float32, tied: bool = False) -> Model:
    """A model of SIZES; `tp` devices on axis `model`."""
    config, build = FAMILIES[family]
    shared = {"vocab": VOCAB, "hidden": 16, "heads": 4, "kv_heads": 2, "head_dim": 8, "logit_chunk": 24}
    return build(config(**shared, **SIZES[family], tied=tied), dtype, tp)


@functools.cache
def lively_params(family: str, tied: bool = False) -> dict:
    """Parameters of `small_model` moved off their initial ones and zeros, so that each of them matters."""
    rng = np.random.default_rng(1)
    params = init_params(small_model(family, tied=tied), 0)
    return jax.tree.map(lambda x: np.asarray(x + 0.1 * rng.normal(size=x.shape), np.float32), params)


def random_batch(seed: int, microbatches: int, sequences: int, length: int) -> dict[str, np.ndarray]:
    """Random tokens in packed documents, [M, B, S].

    The share of targets that count rises from 1 / M in the first micro-batch to all in the last.
    """
    rng, shape = np.random.default_rng(seed), (microbatches, sequences, length)
    opens = rng.random(shape) < 3 / length
    offsets = np.broadcast_to(np.arange(length, dtype=np.int32), shape)
    share = (np.arange(microbatches) + 1) / microbatches
    return {
        "tokens": rng.integers(0, VOCAB, shape, np.int32),
        "targets": rng.integers(0, VOCAB, shape, np.int32),
        "segments": np.cumsum(opens, -1, np.int32),
        "positions": offsets - np.maximum.accumulate(np.where(opens, offsets, 0), -1),
        "weights": (rng.random(shape) < share[:, None, None]).astype(np.float32),
    }


def padded(batch: dict[str, np.ndarray], microbatches: int, weight: float) -> dict[str, np.ndarray]:
    """The batch with micro-batches of zeros, whose targets have the given weight, up to `microbatches`."""
    result = {}
    for name, value in batch.items():
        filler = np.full_like(value[:1], weight if name == "weights" else 0)
        result[name] = np.concatenate([value, *[filler] * (microbatches - len(value))])
    return result


def sequential(model: Model):
    """A function (params, batch [M, B, S]) -> (loss in nats a valid token, its gradients), both float64.

    It is `jax.value_and_grad` of `apply_model` for each micro-batch, summed in float64. In one float32 sum
    over the whole batch, small gradients that cancel lose more digits than a pipeline may differ by.
    """
    step = jax.jit(
        jax.value_and_grad(lambda params, microbatch: apply_model(model, params, microbatch)["nll"])
    )

    def loss_and_grads(params, batch):
        microbatches = ({n: v[m] for n, v in batch.items()} for m in range(len(batch["weights"])))
        parts = [jax.device_get(step(params, microbatch)) for microbatch in microbatches]
        count = batch["weights"].sum(dtype=np.float64)
        return jax.tree.map(lambda *values: np.sum(values, axis=0, dtype=np.float64) / count, *parts)

    return loss_and_grads


def worst_error(found, expected) -> float:
    """The largest max|found - expected| / max|expected| of any parameter."""
    errors = jax.tree.map(lambda a, b: _ratio(np.abs(a - b).max(), np.abs(b).max()), found, expected)
    return max(jax.tree.leaves(errors))


def norm_error(found, expected) -> float:
    """|found - expected| / |expected|, norms over all parameters."""
    squares = jax.tree.map(lambda a, b: (np.sum((a - b) ** 2), np.sum(b**2)), found, expected)
    differences, sizes = np.array(jax.tree.leaves(squares)).reshape(-1, 2).sum(0)
    return _ratio(np.sqrt(differences), np.sqrt(sizes))


def _ratio(difference, size) -> float:
    return float(difference / size) if difference != 0 else 0.0


class Traced(NamedTuple):
    """A model traced on a mesh under each of some policies; `codes` are those of all of them."""

    model: Model
    mesh: Mesh
    policies: tuple[str, ...]
    codes: Codes
    dtype: np.dtype


def trace(
    model: Model, mesh: Mesh, policies: Sequence[str], sequences: int, length: int, dtype=jnp.float32
) -> Traced:
    """Traces `model` for micro-batches of [sequences, length] over all data shards."""
    shape, codes = (sequences // mesh.shape["data"], length), {}
    for policy in policies:
        codes |= trace_model(model, mesh.abstract_mesh, *shape, (policy,) * len(model.pieces), dtype)
    return Traced(model, mesh, tuple(policies), codes, jnp.dtype(dtype))


def lowered(traced: Traced, plan: Plan) -> Program:
    """The verified program of a plan, whose policies must be among those traced."""
    forward = traced.policies == ("forward",)
    policies = ("forward",) * len(plan.pieces) if forward else plan.recompute
    pieces = piece_specs(traced.model, traced.codes, policies)
    program = lower(plan, pieces)
    verify(program, pieces)
    return program


def share(programs: Sequence[Program]) -> list[Program]:
    """The same programs with one signature: that of most micro-batches, of which others use the first."""
    most = max(p.signature.microbatches for p in programs)
    widened = [replace(p, signature=replace(p.signature, microbatches=most)) for p in programs]
    shared = union([p.signature for p in widened])
    return [fit(p, shared) for p in widened]


def compiled_step(traced: Traced, program: Program):
    """The step of all programs with this program's signature, to be given to `run`."""
    model, count = traced.model, len(traced.model.pieces)
    by_policy = [piece_specs(model, traced.codes, (policy,) * count) for policy in traced.policies]
    layout = make_layout(model, program)
    pieces = [spec for specs in by_policy for spec in specs]
    step = make_step(model, layout, pieces, traced.codes, program.signature, traced.mesh, traced.dtype)
    return jax.jit(step, compiler_options=compiler_options(traced.mesh))


def run(traced: Traced, step, program: Program, params: dict, batch: dict) -> tuple[float, dict]:
    """(loss, grads) in NumPy as `sequential` means them; no grads from forward programs.

    batch: [M, B, S] with the micro-batches of the plan. Those that the signature has on top get
    weights of NaN, so that the result tells if one is touched.
    """
    layout = make_layout(traced.model, program)
    tables, length, ties = program_arguments(program, traced.model, layout)
    slots = jax.device_get(to_slots(traced.model, layout, params))
    scales = {"nll": np.float32(1 / batch["weights"].sum())}
    whole = padded(batch, program.signature.microbatches, np.nan)
    grads, losses = jax.device_get(step(slots, whole, tables, length, scales, ties))
    return float(losses["nll"] * scales["nll"]), from_slots(traced.model, layout, grads) if grads else {}
