"""Frozen dataclasses from trees of plain values and back, with one clear line for every mistake."""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping

from ml_collections import config_dict


def limited(default, **limits):
    """A dataclass field with limits for `check_limits`: at_least, at_most, above, below, choices."""
    return dataclasses.field(default=default, metadata=limits)


def build(cls, values: Mapping, path: str):
    """An instance of dataclass `cls` from plain values; `path` is where they stand in the configuration.

    Raises:
      ValueError: naming a field that is unknown, missing or of a wrong type, or as `cls` itself raises.
    """
    if not isinstance(values, Mapping):
        raise ValueError(
            f"field {path!r} is {values!r} ({type(values).__name__}); expected a table of fields"
        )
    hints = typing.get_type_hints(cls)
    for name in values:
        if name not in hints:
            raise ValueError(unknown_field(f"{path}.{name}", hints))
    missing = [f.name for f in _required(cls) if values.get(f.name) is None]
    if missing:
        raise ValueError(f"field '{path}.{missing[0]}' is missing; expected {_type_name(hints[missing[0]])}")
    fields = {name: checked(f"{path}.{name}", value, hints[name]) for name, value in values.items()}
    try:
        return cls(**fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def checked(path: str, value, expected):
    """`value` as the annotation `expected` asks for: integers pass for floats, lists for tuples.

    Knows bool, int, str, (finite) float, dataclasses, `tuple[X, ...]` and `X | None`.

    Raises:
      ValueError: naming the field, what it holds and the type it should have.
    """
    if dataclasses.is_dataclass(expected):
        return build(expected, value, path)
    if isinstance(expected, types.UnionType) or typing.get_origin(expected) is typing.Union:
        if value is None:
            return None
        (inner,) = (arg for arg in typing.get_args(expected) if arg is not type(None))
        return checked(path, value, inner)
    if typing.get_origin(expected) is tuple:
        if isinstance(value, tuple | list):
            inner = typing.get_args(expected)[0]
            return tuple(checked(f"{path}[{i}]", item, inner) for i, item in enumerate(value))
    elif expected is float:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    elif type(value) is expected:
        return value
    raise ValueError(f"field {path!r} is {value!r} ({type(value).__name__}); expected {_type_name(expected)}")


def check_limits(config, path: str = "") -> None:
    """Checks the fields made by `limited`, in nested dataclasses too.

    Raises:
      ValueError: naming the field, what it holds and its limit.
    """
    tests = {
        "at_least": (lambda v, limit: v >= limit, "at least {}"),
        "at_most": (lambda v, limit: v <= limit, "at most {}"),
        "above": (lambda v, limit: v > limit, "more than {}"),
        "below": (lambda v, limit: v < limit, "less than {}"),
        "choices": (lambda v, limit: v in limit, "one of {}"),
    }
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            check_limits(value, f"{path}{field.name}.")
        for limit, bound in field.metadata.items():
            holds, words = tests[limit]
            if not holds(value, bound):
                expected = words.format(", ".join(bound) if limit == "choices" else bound)
                raise ValueError(f"field '{path}{field.name}' is {value!r}; expected {expected}")


def default_tree(cls) -> dict:
    """The defaults of dataclass `cls` as nested dictionaries.

    A field without a default, or whose default is None, becomes a typed placeholder, so that
    ml_collections lets the command line set it.
    """
    tree, hints = {}, typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if dataclasses.is_dataclass(hints[field.name]):
            value = default_tree(hints[field.name])
        elif value is None or value is dataclasses.MISSING:
            inner = [arg for arg in typing.get_args(hints[field.name]) if arg is not type(None)]
            is_tuple = typing.get_origin(hints[field.name]) is tuple
            value = config_dict.placeholder(tuple if is_tuple else (inner or [hints[field.name]])[0])
        tree[field.name] = value
    return tree


def plain(value):
    """Nested dictionaries and tuples as JSON has them."""
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value


def unknown_field(path: str, known: Iterable[str]) -> str:
    """The message for a field that does not exist; `known` are the names beside it."""
    known = list(known)
    near = difflib.get_close_matches(path.rpartition(".")[2], known, n=1)
    hint = f" did you mean {near[0]!r}?" if near else ""
    return f"unknown field {path!r};{hint} known: {', '.join(known)}"


def _required(cls) -> list[dataclasses.Field]:
    absent = dataclasses.MISSING
    return [f for f in dataclasses.fields(cls) if f.default is absent and f.default_factory is absent]


def _type_name(expected) -> str:
    if expected in (int, float):
        return "a whole number" if expected is int else "a finite number"
    return expected.__name__ if isinstance(expected, type) else str(expected)
