"""Tensor and sequence parallelism inside a piece, over the mesh axis `model`.

Between pieces the residual stream is split along the sequence. A block gathers it, multiplies it
with its columns of the first matrices and its rows of the last one, and sums the partial results
back into shards (Megatron-LM, arXiv 2205.05198, section 4.2.2). With `tp` = 1 nothing is called, so that the
sequential model runs outside any mesh.
"""

import jax
from jax import lax

AXIS = "model"


def gather_sequence(x_BxSxH: jax.Array, tp: int) -> jax.Array:
    """[B, S/tp, H] -> [B, S, H]; its transpose is `scatter_sequence`."""
    return x_BxSxH if tp == 1 else lax.all_gather(x_BxSxH, AXIS, axis=1, tiled=True)


def scatter_sequence(partial_BxSxH: jax.Array, tp: int) -> jax.Array:
    """Sums [B, S, H] over `model` and keeps this device's [B, S/tp, H]; transpose of `gather_sequence`.

    Raises:
      ValueError: when `tp` does not divide S.
    """
    if tp == 1:
        return partial_BxSxH
    if partial_BxSxH.shape[1] % tp:
        raise ValueError(f"a sequence of {partial_BxSxH.shape[1]} tokens does not split over tp={tp} devices")
    return lax.psum_scatter(partial_BxSxH, AXIS, scatter_dimension=1, tiled=True)


def device_index(tp: int) -> jax.Array | int:
    """This device's place on axis `model`, 0 with `tp` = 1."""
    return 0 if tp == 1 else lax.axis_index(AXIS)


def sum_over_model(x: jax.Array, tp: int) -> jax.Array:
    """The sum of x over `model`."""
    return x if tp == 1 else lax.psum(x, AXIS)


def max_over_model(x: jax.Array, tp: int) -> jax.Array:
    """The elementwise maximum of x over `model` (without a derivative)."""
    return x if tp == 1 else lax.pmax(x, AXIS)
