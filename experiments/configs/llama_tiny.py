"""A small Llama-like model on the bytes of Python's standard library.

    python -m experiments.train --config=experiments/configs/llama_tiny.py --workdir=runs/llama_tiny

1.7M parameters in 26 pieces on 4 pipeline devices, 300 steps; the data are those of nemotron_h_tiny.py, the
vocabulary is padded to 2048. What to expect, in nats per byte on held-out files (Python 3.12):

    uniform over 256 bytes      5.55
    unigram, bigram, trigram    3.26, 2.49, 1.90
    this model                  2.31 after 100 steps
"""

from ml_collections import ConfigDict

from jaxpipe.training.config import defaults


def get_config(arg: str | None = None) -> ConfigDict:
    """The complete configuration; `arg` (what follows a colon in --config) is not used."""
    del arg
    config = defaults("llama")
    config.model.update(
        vocab=2048,
        hidden=128,
        layers=6,
        heads=4,
        kv_heads=2,
        head_dim=32,
        mlp_hidden=384,
    )
    config.data.sequence_length = 256
    config.batch.update(global_batch=32, microbatches=8)
    config.mesh.stage = 4
    config.optimizer.update(learning_rate=3e-3, warmup_steps=30)
    config.train.update(steps=300, eval_every=50, checkpoint_every=50)
    return config
