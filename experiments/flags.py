"""The flag --config of all entry points, whose mistakes get one clear line each."""

import re
import sys
import traceback
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags
from ml_collections import ConfigDict, config_flags
from ml_collections.config_flags.tuple_parser import TupleParser

from experiments import command_line
from jaxpipe.training.fields import unknown_field

if TYPE_CHECKING:
    from jaxpipe.training.config import Config

CONFIG_EXAMPLE = "experiments/configs/llama_tiny.py"
PARSERS = {
    int: (flags.IntegerParser(), "a whole number"),
    float: (flags.FloatParser(), "a number"),
    bool: (flags.BooleanParser(), "true or false"),
    tuple: (TupleParser(), "a tuple such as \"('a', 'b')\""),
}
"""By the type of a field: what ml_collections reads its value with, and the words for it."""


def define_config() -> flags.FlagHolder:
    """Defines --config=FILE and its overrides --config.a.b=VALUE; the value is the file's ConfigDict."""
    return config_flags.DEFINE_config_file("config", None, "configuration file, as in experiments/configs/")


def parse(argv: list[str]) -> list[str]:
    """Parses the command line, for `absl.app.run(main, flags_parser=parse)`.

    Exits with one line when a flag is missing, unknown or has a wrong value, when the configuration file
    does not load, or when it lacks an overridden field.
    """
    if not any(re.fullmatch(r"--?help(full|short|xml)?", argument) for argument in argv):
        try:
            _check(argv)
        except ValueError as error:
            command_line.stop(str(error))
    return command_line.parse(argv)


def resolve(config: ConfigDict) -> "Config":
    """The checked configuration; exits with one line when a field is wrong."""
    from jaxpipe.training.config import from_config_dict  # imports JAX

    try:
        return from_config_dict(config)
    except ValueError as error:
        command_line.stop(str(error))


def _check(argv: list[str]) -> None:
    path = _config_path(argv)
    if path is None:
        raise ValueError(f"--config is missing; expected a file such as {CONFIG_EXAMPLE}")
    file, colon, argument = path.partition(":")
    if not Path(file).is_file():
        raise ValueError(f"--config is {path!r}, which is no file; expected one such as {CONFIG_EXAMPLE}")
    tree = _load(file, [argument] if colon else [])
    for given, following in zip(argv[1:], [*argv[2:], None]):
        if override := re.fullmatch(r"--?(no)?config\.([\w.]+)(?:=(.*))?", given, re.DOTALL):
            negated, field, value = override.groups()
            if value is None and following is not None and not following.startswith("--"):
                value = following
            expected = _field_type(tree, field)
            if expected is not bool or "=" in given:
                _check_value(field, expected, bool(negated), value)


def _config_path(argv: list[str]) -> str | None:
    for argument, following in zip(argv[1:], [*argv[2:], None]):
        if given := re.match(r"--?config(=|$)", argument):
            return argument[given.end() :] if given[1] else following
    return None


def _load(file: str, arguments: list[str]) -> ConfigDict:
    """What the file's get_config returns; ml_collections would hide where in the file an error arose."""
    name = "config_config"
    module = module_from_spec(spec_from_loader(name, SourceFileLoader(name, file)))
    sys.modules[name] = module
    try:
        module.__spec__.loader.exec_module(module)
        get_config = getattr(module, "get_config", None)
        tree = get_config(*arguments) if callable(get_config) else None
    except Exception as error:  # the file is the user's code, so any error in it is the user's
        raise ValueError(_load_error(file, error)) from error
    finally:
        del sys.modules[name]
    if not callable(get_config):
        raise ValueError(f"{file}: no function get_config; expected one that returns a ConfigDict")
    if not isinstance(tree, ConfigDict):
        raise ValueError(f"{file}: get_config returned {type(tree).__name__}; expected a ConfigDict")
    return tree


def _load_error(file: str, error: Exception) -> str:
    def inside(name: str | None) -> bool:
        return name is not None and Path(name).absolute() == Path(file).absolute()

    if isinstance(error, SyntaxError) and inside(error.filename):
        line, message = error.lineno, error.msg
    else:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if inside(f.filename)]
        line, message = (lines[-1] if lines else None), " ".join(str(error).split())
    return f"{file}{f':{line}' if line else ''}: {type(error).__name__}: {message}"


def _field_type(tree: ConfigDict, path: str) -> type:
    names = path.split(".")
    for depth, name in enumerate(names, 1):
        if not isinstance(tree, ConfigDict):
            raise ValueError(f"field '{'.'.join(names[: depth - 1])}' has no fields; got --config.{path}")
        if name not in tree:
            raise ValueError(unknown_field(".".join(names[:depth]), tree.keys()))
        parent, tree = tree, tree[name]
    return parent.get_type(names[-1])


def _check_value(field: str, expected: type, negated: bool, value: str | None) -> None:
    if issubclass(expected, ConfigDict):
        given = "without a value" if value is None else f"to {value!r}"
        raise ValueError(f"field {field!r} is a table, set {given}; expected --config.{field}.NAME=VALUE")
    parser, words = PARSERS.get(expected, (flags.ArgumentParser(), expected.__name__))
    if negated:
        raise ValueError(f"field {field!r} is set by --noconfig.{field}; expected --config.{field}={words}")
    if value is None:
        raise ValueError(f"field {field!r} has no value; expected {words}")
    try:
        parser.parse(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"field {field!r} is {value!r}; expected {words}") from error
