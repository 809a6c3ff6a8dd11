"""Llama-like models (arXiv 2302.13971): rotary attention with grouped key heads, SwiGLU, RMSNorm."""

from dataclasses import dataclass

import jax.numpy as jnp

from jaxpipe.models.attention import AttentionCore, AttentionPost, AttentionPre, attention_pieces
from jaxpipe.models.checks import check_counts, check_multiple, check_positive, check_split
from jaxpipe.models.head import Head
from jaxpipe.models.layers import Embedding, SwiGLU
from jaxpipe.models.piece import Model, Piece


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama-like model.

    tied: the output head uses the embedding's table.
    window: tokens that attention looks back (itself included); None for all.
    attention_soft_cap, logit_soft_cap: caps of scores and logits; None for none.
    logit_chunk: tokens for which the head holds logits at a time.

    Raises ValueError naming the field that makes no sense.
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_hidden: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied: bool = False
    window: int | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    logit_chunk: int = 1024

    def __post_init__(self):
        check_counts(
            self, "vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "mlp_hidden", "logit_chunk"
        )
        check_positive(self, "rope_theta", "norm_eps")
        if self.window is not None:
            check_counts(self, "window")
        caps = ("attention_soft_cap", "logit_soft_cap")
        check_positive(self, *(name for name in caps if getattr(self, name) is not None))
        check_multiple(self, "heads", of="kv_heads")
        if self.head_dim % 2:
            raise ValueError(f"LlamaConfig: head_dim is {self.head_dim}; rotary embedding needs an even one")


def build(config: LlamaConfig, dtype=jnp.float32, tp: int = 1) -> Model:
    """The model's pieces: embed; pre, attention, post and mlp of each layer; head.

    Args:
      config: sizes.
      dtype: of values and matmuls; parameters are float32.
      tp: devices on mesh axis `model`.

    Raises:
      ValueError: when `tp` does not divide a size that it splits.
    """
    check_split(config, tp, "vocab", "heads", "kv_heads", "mlp_hidden")
    shared = {"hidden": config.hidden, "tp": tp, "dtype": jnp.dtype(dtype)}
    eps, blocks = config.norm_eps, 2 * config.layers
    pre = AttentionPre(
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        norm_eps=eps,
        rope_theta=config.rope_theta,
        **shared,
    )
    core = AttentionCore(config.window, config.attention_soft_cap, tp, jnp.dtype(dtype))
    post = AttentionPost(heads=config.heads, head_dim=config.head_dim, blocks=blocks, **shared)
    mlp = SwiGLU(mlp_hidden=config.mlp_hidden, blocks=blocks, norm_eps=eps, **shared)
    head = Head(
        vocab=config.vocab,
        chunk=config.logit_chunk,
        norm_eps=eps,
        soft_cap=config.logit_soft_cap,
        **shared,
    )
    pieces = [Piece("embed", "embed", Embedding(vocab=config.vocab, **shared), (), ("x",))]
    for i in range(config.layers):
        name = f"layer_{i:02d}"
        pieces += attention_pieces(name, pre, core, post)
        pieces.append(Piece(f"{name}/mlp", "mlp", mlp, ("x",), ("x",)))
    tied = (("table", ("embed", "table")),) if config.tied else ()
    pieces.append(Piece("head", "head", head, ("x",), (), ("nll",), tied))
    return Model("llama", tuple(pieces))
