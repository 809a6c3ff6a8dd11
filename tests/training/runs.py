"""A tiny run: its corpus and its configuration."""

from pathlib import Path
from random import Random

from jaxpipe.training.config import Config, defaults, from_config_dict

MODELS = {
    "llama": {"layers": 2, "mlp_hidden": 32},
    "nemotron_h": {
        "pattern": "M-*-",
        "mlp_hidden": 32,
        "mamba_heads": 4,
        "mamba_head_dim": 8,
        "mamba_groups": 2,
        "mamba_state": 8,
        "chunk": 8,
    },
}


def make_corpus(folder: Path) -> Path:
    """Five files of random words, of which the last is held out."""
    folder.mkdir(parents=True)
    random, words = Random(0), ("pipeline ", "stage ", "micro-batch ", "bubble ", "schedule\n")
    for number in range(5):
        (folder / f"{number}.txt").write_text("".join(random.choices(words, k=100 + 20 * number)))
    return folder


def tiny_config(corpus: Path | str, family: str = "llama", **changes) -> Config:
    """Six steps of 8 sequences of 16 bytes in 4 micro-batches; `changes` by section of the configuration."""
    tree = defaults(family).to_dict()
    sizes = {"vocab": 256, "hidden": 16, "heads": 4, "kv_heads": 2, "head_dim": 8}
    tree["model"] |= sizes | MODELS[family]
    tree["data"] |= {"corpus": str(corpus), "sequence_length": 16, "holdout_every": 5}
    tree["batch"] |= {"global_batch": 8, "microbatches": 4}
    tree["mesh"] |= {"stage": 4}
    tree["optimizer"] |= {"learning_rate": 1e-2, "warmup_steps": 2}
    tree["train"] |= {"steps": 6, "log_every": 2, "eval_every": 3, "eval_batches": 2, "checkpoint_every": 2}
    for section, values in changes.items():
        tree[section] = tree[section] | values if isinstance(values, dict) else values
    return from_config_dict(tree)
