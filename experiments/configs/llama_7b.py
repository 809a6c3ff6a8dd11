"""Llama 2 7B (arXiv 2307.09288) in its real size on 8 pipeline devices, bf16.

    python -m experiments.aot --config=experiments/configs/llama_7b.py --topology=1x1x8 --chip=h200

6.74B parameters in 130 pieces; 32 micro-batches of one sequence of 4096 tokens. Sizes: table 2 of
arXiv 2302.13971, which the paper keeps; the MLP's from the configuration published with the weights,
Llama-2-7b-hf. Tokens are bytes here as everywhere, so most of the vocabulary is never a target.

What to expect, compiled for 8 H200s: 33.2 GiB a device, as predicted.
"""

from ml_collections import ConfigDict

from jaxpipe.training.config import defaults


def get_config(arg: str | None = None) -> ConfigDict:
    """The complete configuration; `arg` (what follows a colon in --config) is not used."""
    del arg
    config = defaults("llama")
    config.model.update(
        vocab=32000,
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=32,
        head_dim=128,
        mlp_hidden=11008,
    )
    config.dtype = "bfloat16"
    config.data.sequence_length = 4096
    config.batch.update(global_batch=32, microbatches=32)
    config.mesh.stage = 8
    config.plan.update(schedule="1f1b_split", chip="h200")
    config.optimizer.update(learning_rate=3e-4, warmup_steps=2000)
    return config
