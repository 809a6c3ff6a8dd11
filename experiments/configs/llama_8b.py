"""Llama 3 8B (arXiv 2407.21783) in its real size on 8 pipeline devices, bf16.

    python -m experiments.aot --config=experiments/configs/llama_8b.py --topology=1x1x8 --chip=h200

8.03B parameters in 130 pieces; 32 micro-batches of one sequence of 4096 tokens. Sizes: table 3 of the
paper; heads of 128 as in the configuration published with the weights, Meta-Llama-3-8B. Tokens are bytes
here as everywhere, so most of the vocabulary is never a target.

What to expect, compiled for 8 H200s: 53.9 GiB a device, as predicted. Slots are padded to those of the
largest device, so every device has room for the embedding and the head.
"""

from ml_collections import ConfigDict

from jaxpipe.training.config import defaults


def get_config(arg: str | None = None) -> ConfigDict:
    """The complete configuration; `arg` (what follows a colon in --config) is not used."""
    del arg
    config = defaults("llama")
    config.model.update(
        vocab=128256,
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        mlp_hidden=14336,
        rope_theta=500000.0,
    )
    config.dtype = "bfloat16"
    config.data.sequence_length = 4096
    config.batch.update(global_batch=32, microbatches=32)
    config.mesh.stage = 8
    config.plan.update(schedule="1f1b_split", chip="h200")
    config.optimizer.update(learning_rate=3e-4, warmup_steps=2000)
    return config
