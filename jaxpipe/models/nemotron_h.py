"""Nemotron-H-like hybrids (arXiv 2504.03624): Mamba-2, squared-ReLU MLPs and a few attention layers.

Attention has no position embedding; the Mamba-2 blocks know the order of tokens.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from jaxpipe.models.attention import AttentionCore, AttentionPost, AttentionPre, attention_pieces
from jaxpipe.models.checks import check_counts, check_multiple, check_positive, check_split
from jaxpipe.models.head import Head
from jaxpipe.models.layers import Embedding, SquaredReLU
from jaxpipe.models.mamba2 import Mamba2
from jaxpipe.models.piece import Model, Piece

LETTERS = {"M": "Mamba-2", "-": "MLP", "*": "attention"}
"""What a letter of `pattern` stands for."""


@dataclass(frozen=True)
class NemotronHConfig:
    """Sizes of a hybrid model.

    pattern: one letter a layer, M for Mamba-2, - for an MLP, * for attention, as in "M-M-M*-".
    mamba_heads, mamba_head_dim, mamba_groups, mamba_state: the Mamba-2 blocks; heads of a group share the
        input and output vectors of the state.
    conv_width: tokens that the short convolution sees.
    chunk: tokens in a chunk of the state-space computation; changes speed, not results.
    tied: the output head uses the embedding's table.
    logit_chunk: tokens for which the head holds logits at a time.

    Raises ValueError naming the field that makes no sense.
    """

    vocab: int
    hidden: int
    pattern: str
    heads: int
    kv_heads: int
    head_dim: int
    mlp_hidden: int
    mamba_heads: int
    mamba_head_dim: int
    mamba_groups: int
    mamba_state: int
    conv_width: int = 4
    chunk: int = 128
    norm_eps: float = 1e-5
    tied: bool = False
    logit_chunk: int = 1024

    def __post_init__(self):
        check_counts(self, "vocab", "hidden", "heads", "kv_heads", "head_dim", "mlp_hidden")
        check_counts(self, "mamba_heads", "mamba_head_dim", "mamba_groups", "mamba_state")
        check_counts(self, "conv_width", "chunk", "logit_chunk")
        check_positive(self, "norm_eps")
        check_multiple(self, "heads", of="kv_heads")
        check_multiple(self, "mamba_heads", of="mamba_groups")
        allowed = ", ".join(f"{letter} ({meaning})" for letter, meaning in LETTERS.items())
        if not self.pattern:
            raise ValueError(f"NemotronHConfig: pattern is empty; expected letters among {allowed}")
        for i, letter in enumerate(self.pattern):
            if letter not in LETTERS:
                raise ValueError(
                    f"NemotronHConfig: pattern {self.pattern!r} has {letter!r} at position {i}; "
                    f"allowed are {allowed}"
                )


def build(config: NemotronHConfig, dtype=jnp.float32, tp: int = 1) -> Model:
    """The model's pieces: embed; by letter mamba, mlp, or pre, attention and post of each layer; head.

    Args:
      config: sizes and pattern.
      dtype: of values and matmuls; parameters are float32.
      tp: devices on mesh axis `model`.

    Raises:
      ValueError: when `tp` does not divide a size that it splits.
    """
    check_split(config, tp, "vocab", "heads", "kv_heads", "mlp_hidden", "mamba_groups")
    shared = {"hidden": config.hidden, "tp": tp, "dtype": jnp.dtype(dtype)}
    eps, blocks = config.norm_eps, len(config.pattern)
    heads = {"heads": config.heads, "head_dim": config.head_dim}
    pre = AttentionPre(kv_heads=config.kv_heads, norm_eps=eps, **heads, **shared)
    core = AttentionCore(tp=tp, dtype=jnp.dtype(dtype))
    post = AttentionPost(blocks=blocks, **heads, **shared)
    mlp = SquaredReLU(mlp_hidden=config.mlp_hidden, blocks=blocks, norm_eps=eps, **shared)
    mamba = Mamba2(
        heads=config.mamba_heads,
        head_dim=config.mamba_head_dim,
        groups=config.mamba_groups,
        state=config.mamba_state,
        conv_width=config.conv_width,
        chunk=config.chunk,
        blocks=blocks,
        norm_eps=eps,
        **shared,
    )
    pieces = [Piece("embed", "embed", Embedding(vocab=config.vocab, **shared), (), ("x",))]
    for i, letter in enumerate(config.pattern):
        name = f"layer_{i:02d}"
        if letter == "M":
            pieces.append(Piece(f"{name}/mamba", "mamba", mamba, ("x",), ("x",)))
        elif letter == "-":
            pieces.append(Piece(f"{name}/mlp", "mlp", mlp, ("x",), ("x",)))
        else:
            pieces += attention_pieces(name, pre, core, post)
    head = Head(vocab=config.vocab, chunk=config.logit_chunk, norm_eps=eps, **shared)
    tied = (("table", ("embed", "table")),) if config.tied else ()
    pieces.append(Piece("head", "head", head, ("x",), (), ("nll",), tied))
    return Model("nemotron_h", tuple(pieces))
