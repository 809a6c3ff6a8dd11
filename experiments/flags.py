"""The flag --config of all entry points, whose mistakes get one clear line each."""

import re
import sys
from pathlib import Path

from absl import app, flags
from ml_collections import ConfigDict, config_flags

from jaxpipe.training.config import Config, from_config_dict
from jaxpipe.training.fields import unknown_field


def define_config() -> flags.FlagHolder:
    """Defines --config=FILE and its overrides --config.a.b=VALUE; the value is the file's ConfigDict."""
    return config_flags.DEFINE_config_file("config", None, "configuration file, as in experiments/configs/")


def parse(argv: list[str]) -> list[str]:
    """Parses the command line, for `absl.app.run(main, flags_parser=parse)`.

    Exits with one line when --config is missing, no file, or overridden in a field that it lacks.
    """
    if not any(re.fullmatch(r"--?help(full|short|xml)?", argument) for argument in argv):
        try:
            _check(argv)
        except ValueError as error:
            sys.exit(f"{Path(argv[0]).name}: {error}")
    return app.parse_flags_with_usage(argv)


def resolve(config: ConfigDict) -> Config:
    """The checked configuration; exits with one line when a field is wrong."""
    try:
        return from_config_dict(config)
    except ValueError as error:
        sys.exit(f"--config: {error}")


def _check(argv: list[str]) -> None:
    path = _config_path(argv)
    if path is None:
        raise ValueError("--config is missing; expected a file such as experiments/configs/llama_tiny.py")
    if not Path(path.partition(":")[0]).is_file():
        raise ValueError(f"--config is {path!r}, which is no file; expected one as in experiments/configs/")
    scratch = flags.FlagValues()
    holder = config_flags.DEFINE_config_file("config", flag_values=scratch, sys_argv=[])
    scratch([argv[0], f"--config={path}"])
    for argument in argv[1:]:
        if override := re.match(r"--?(?:no)?config\.([\w.]+)", argument):
            _check_override(holder.value, override[1])


def _config_path(argv: list[str]) -> str | None:
    for argument, following in zip(argv[1:], [*argv[2:], None]):
        if given := re.match(r"--?config(=|$)", argument):
            return argument[given.end() :] if given[1] else following
    return None


def _check_override(tree: ConfigDict, path: str) -> None:
    for depth, name in enumerate(names := path.split("."), 1):
        if not isinstance(tree, ConfigDict):
            raise ValueError(f"field '{'.'.join(names[: depth - 1])}' has no fields; got --config.{path}")
        if name not in tree:
            raise ValueError(unknown_field(".".join(names[:depth]), tree.keys()))
        tree = tree[name]
