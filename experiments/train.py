"""Trains a model: python -m experiments.train --config=experiments/configs/nemotron_h_tiny.py --workdir=DIR.

The same command again resumes. Fields are overridden as in --config.optimizer.learning_rate=1e-3.
"""

import os
import sys
from logging import CRITICAL, Formatter, getLogger
from pathlib import Path

from absl import app, flags, logging

from experiments import flags as config_flags
from experiments.command_line import quit_on_signals

CONFIG = config_flags.define_config()
WORKDIR = flags.DEFINE_string(
    "workdir", None, "folder of the run; made if missing, resumed if not", required=True
)


def main(argv: list[str]) -> None:
    """Resolves the configuration, then trains."""
    if len(argv) > 1:
        sys.exit(f"train: unexpected argument {argv[1]!r}; flags start with --")
    config = config_flags.resolve(CONFIG.value)
    import jax
    from rich.console import Console

    from jaxpipe.runtime.mesh import ask_for_virtual_devices
    from jaxpipe.training.trainer import NonFiniteError, train

    if not WORKDIR.value:
        sys.exit("train: --workdir is empty; expected the folder of the run")
    logging.set_verbosity(logging.WARNING)
    logging.get_absl_handler().setFormatter(Formatter("%(levelname)s: %(message)s"))
    # Orbax abandons its other reads when one fails, and asyncio reports each of them.
    getLogger("asyncio").setLevel(CRITICAL)
    ask_for_virtual_devices(config.mesh.stage * config.mesh.data * config.mesh.model)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = Path(WORKDIR.value).absolute().parent / ".compilation_cache"
        try:
            cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            sys.exit(f"train: cannot write to {cache.parent}, where --workdir would be: {error.strerror}")
        jax.config.update("jax_compilation_cache_dir", str(cache))
    try:
        result = train(config, WORKDIR.value, Console())
    except (ValueError, NonFiniteError) as error:
        sys.exit(f"train: {error}")
    if result.signal is not None:
        sys.exit(128 + result.signal)


def parse(argv: list[str]) -> list[str]:
    """Parses the command line, which takes seconds: the configuration's file imports JAX."""
    quit_on_signals("the same command goes on from the last checkpoint")
    return config_flags.parse(argv)


if __name__ == "__main__":
    app.run(main, flags_parser=parse)
