"""Code of a model's pieces: traced once by kind and policy, on the local types of a mesh."""

import functools
from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jaxpipe.models.backward import PieceCode, trace_piece, varying, zeros
from jaxpipe.models.piece import Model, example_batch, param_shapes, param_specs, piece_params
from jaxpipe.models.stash import CHEAP

AXES = ("stage", "data", "model")
Codes = dict[tuple[str, str], PieceCode]
"""Code by (kind, recompute policy)."""


def abstract_mesh(stage: int, data: int = 1, model: int = 1) -> AbstractMesh:
    """A mesh of the given axis sizes without devices: enough to trace, plan and predict."""
    return AbstractMesh((stage, data, model), AXES, axis_types=(AxisType.Auto,) * 3)


def trace_model(
    model: Model, mesh: AbstractMesh, sequences: int, length: int, policies: Sequence[str], dtype
) -> Codes:
    """Traces every piece on the local types it will see. Needs no devices.

    Args:
      mesh: the mesh whose `model` axis splits the pieces; code runs on that very mesh only.
      sequences: of one micro-batch on one data shard.
      length: tokens of a sequence.
      policies: recompute policy of each piece.
      dtype: that matrices are cast to before the tick loop.
    """
    return _trace_model(model, mesh, sequences, length, tuple(policies), jax.numpy.dtype(dtype))


@functools.cache
def _trace_model(model, mesh, sequences, length, policies, dtype) -> Codes:
    codes: Codes = {}

    def body(params, batch):
        params, batch = jax.tree.map(lambda v: varying(v, AXES), (compute_copy(params, dtype), batch))
        types = {}
        for piece, policy in zip(model.pieces, policies, strict=True):
            key = piece.kind, policy
            if key not in codes:
                reads = {n: types[n] for n in piece.reads}
                own = piece_params(piece, params)
                codes[key] = trace_piece(piece, own, reads, batch, policy, AXES, CHEAP[_place(mesh)])
            for name in piece.reads:
                expected, found = codes[key].types["read", name], types[name]
                if (expected.shape, expected.dtype) != (found.shape, found.dtype):
                    raise ValueError(
                        f"piece {piece.name!r} reads {name!r} as {found.dtype}{found.shape}; "
                        f"others of kind {piece.kind!r} as {expected.dtype}{expected.shape}"
                    )
            types |= {n: zeros(t, AXES) for n, t in codes[key].group("write").items()}
        return jax.numpy.zeros(())

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(param_specs(model), PartitionSpec()), out_specs=PartitionSpec()
    )
    jax.eval_shape(mapped, param_shapes(model), example_batch(sequences, length))
    return codes


def _place(mesh: AbstractMesh) -> str:
    """The key of CHEAP for a mesh. One without devices stands for accelerators to come."""
    device = mesh.abstract_device
    return "cpu" if device is not None and device.platform == "cpu" else "accelerator"


def compute_copy(params, dtype):
    """Parameters as the pieces read them: matrices cast to `dtype`, vectors and scalars left in float32.

    The number of axes tells them apart, here and for weight decay (`optimizer.decay_mask`). So a piece stores
    what scales or shifts single channels or heads (norms, biases, decay rates) as a vector, and reshapes it
    where it is used; a parameter with two or more axes is cast and decayed.
    """
    return jax.tree.map(lambda v: v.astype(dtype) if v.ndim >= 2 else v, params)
