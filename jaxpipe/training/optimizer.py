"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) with warm-up, cosine decay and clipping by the norm.

Clipping is apart from the transformation because the gradients are spread over the stages: whoever
holds them all knows the global norm.
"""

import jax
import jax.numpy as jnp
import optax

from jaxpipe.training.config import Config


def learning_rate(config: Config, step: int | jax.Array) -> jax.Array:
    """The learning rate, float32[], of the update number `step` (from 0).

    Rises linearly over `warmup_steps` updates, the last of which has the full rate, then falls along
    half a cosine to `final_fraction` of it at update number `train.steps`.
    """
    settings, steps = config.optimizer, config.train.steps
    step = jnp.asarray(step, jnp.float32)
    warmup = (step + 1) / max(1, settings.warmup_steps)
    progress = (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
    cosine = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(progress, 0, 1)))
    decayed = settings.final_fraction + (1 - settings.final_fraction) * cosine
    return settings.learning_rate * jnp.where(step < settings.warmup_steps, warmup, decayed)


def decay_mask(params) -> dict:
    """True for the leaves that weight decay applies to: matrices and higher, not vectors or scalars.

    The pieces' convention, as for `code.compute_copy`: matrices are cast to the compute dtype and decay;
    norms, biases and whatever else has one number a channel or head are vectors, stay float32 and do not.
    `params` must have the shapes of single pieces: a leading stage axis would make vectors matrices.
    """
    return jax.tree.map(lambda leaf: len(leaf.shape) >= 2, params)


def make_optimizer(config: Config, decay_mask) -> optax.GradientTransformation:
    """AdamW without clipping. `decay_mask` is a tree of booleans shaped like the parameters."""
    settings = config.optimizer
    return optax.adamw(
        lambda step: learning_rate(config, step),
        b1=settings.b1,
        b2=settings.b2,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        mask=decay_mask,
    )


def clip_by_norm(grads, norm: jax.Array, clip: float):
    """Scales the gradients so that a global norm of `norm` becomes at most `clip`."""
    scale = jnp.minimum(1.0, clip / norm)
    return jax.tree.map(lambda grad: grad * scale.astype(grad.dtype), grads)


def get_moments(state: optax.OptState) -> tuple:
    """First and second moments of the gradients, each shaped like the parameters."""
    return optax.tree_utils.tree_get(state, "mu"), optax.tree_utils.tree_get(state, "nu")


def set_moments(state: optax.OptState, mu, nu, step: int | jax.Array) -> optax.OptState:
    """The state after `step` updates that left the moments `mu` and `nu`."""
    count = jnp.asarray(step, jnp.int32)
    return optax.tree_utils.tree_set(state, mu=mu, nu=nu, count=count)
