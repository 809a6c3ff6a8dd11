"""Nemotron-H-8B (arXiv 2504.03624) in its real size on 8 pipeline devices, bf16.

    python -m experiments.aot --config=experiments/configs/nemotron_h_8b.py --topology=1x1x8 --chip=h200

8.10B parameters in 62 pieces: 24 Mamba-2 blocks, 24 MLPs, 4 attention layers; 32 micro-batches of one
sequence of 4096 tokens. Sizes: the paper's section 2.1; the pattern and the heads of Mamba-2: the
configuration published with the weights, Nemotron-H-8B-Base-8K. Tokens are bytes here as everywhere, so most
of the vocabulary is never a target.

What to expect, compiled for 8 H200s: 61.8 GiB a device, as predicted.
"""

from ml_collections import ConfigDict

from jaxpipe.training.config import defaults


def get_config(arg: str | None = None) -> ConfigDict:
    """The complete configuration; `arg` (what follows a colon in --config) is not used."""
    del arg
    config = defaults("nemotron_h")
    config.model.update(
        vocab=131072,
        hidden=4096,
        pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        heads=32,
        kv_heads=8,
        head_dim=128,
        mlp_hidden=21504,
        mamba_heads=128,
        mamba_head_dim=64,
        mamba_groups=8,
        mamba_state=128,
    )
    config.dtype = "bfloat16"
    config.data.sequence_length = 4096
    config.batch.update(global_batch=32, microbatches=32)
    config.mesh.stage = 8
    config.plan.update(schedule="1f1b_split", chip="h200")
    config.optimizer.update(learning_rate=3e-4, warmup_steps=2000)
    return config
