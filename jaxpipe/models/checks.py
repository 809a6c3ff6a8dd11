"""Checks that the configurations of all families share. Each raises ValueError naming the field."""


def check_counts(config, *fields: str) -> None:
    """Every field is an integer of at least 1."""
    for field in fields:
        value = getattr(config, field)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"{type(config).__name__}: {field} is {value!r}; expected an integer of at least 1"
            )


def check_positive(config, *fields: str) -> None:
    """Every field is a number above 0."""
    for field in fields:
        value = getattr(config, field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"{type(config).__name__}: {field} is {value!r}; expected a number above 0")


def check_multiple(config, field: str, of: str) -> None:
    """`field` is a multiple of the field `of`."""
    value, unit = getattr(config, field), getattr(config, of)
    if value % unit:
        raise ValueError(f"{type(config).__name__}: {field} is {value}; expected a multiple of {of}={unit}")


def check_split(config, tp: int, *fields: str) -> None:
    """`tp` devices share every field evenly."""
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        raise ValueError(f"tp is {tp!r}; expected an integer of at least 1")
    for field in fields:
        if getattr(config, field) % tp:
            name, value = type(config).__name__, getattr(config, field)
            raise ValueError(f"{name}: {field} is {value}, which tp={tp} does not divide")
