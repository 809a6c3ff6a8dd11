"""Times, bytes and counts as people read them."""

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
"""Length of the time units of cost tables; the unit "unit" has none."""

SCIENTIFIC = 1e5
"""Numbers from here on stand in exponent form, so that columns stay narrow."""


def unit_seconds(unit: str) -> float:
    """Seconds in one time unit of a cost table that has a stated length.

    Raises:
      ValueError: for any other unit.
    """
    if unit not in SECONDS:
        raise ValueError(f"unknown time unit {unit!r}; known: {', '.join(SECONDS)}, unit")
    return SECONDS[unit]


def format_time(seconds: float) -> str:
    """Three significant digits with the unit that suits: "0", "950 µs", "1.25 ms", "12.4 s", "2 h 05 min"."""
    if seconds >= 3600 * SCIENTIFIC:
        return f"{_digits(seconds / 3600)} h"
    if seconds >= 3599.5:
        minutes = round(seconds / 60)
        return f"{minutes // 60} h {minutes % 60:02d} min"
    if seconds >= 60:
        whole = round(seconds)
        return f"{whole // 60} min {whole % 60:02d} s"
    for size, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= 0.9995 * size:
            return f"{_digits(seconds / size)} {name}"
    return f"{_digits(seconds / 1e-9)} ns" if seconds else "0"


def format_duration(value: float, unit: str) -> str:
    """A time of a cost table; plain digits when the table's unit has no stated length.

    Raises:
      ValueError: when `unit` is no unit of cost tables.
    """
    if unit == "unit":
        return f"{value:,.0f}" if 1000 <= value < 1e9 else _digits(value) if value else "0"
    return format_time(value * unit_seconds(unit))


def format_bytes(size: float) -> str:
    """Three significant digits with a binary unit: "512 B", "1.50 GiB"; from SCIENTIFIC TiB on bytes."""
    if size >= SCIENTIFIC * 1024**4:
        return f"{_digits(size)} B"
    for name in ("B", "KiB", "MiB", "GiB"):
        if size < 999.5:
            return f"{size:.0f} B" if name == "B" else f"{_digits(size)} {name}"
        size /= 1024
    return f"{_digits(size)} TiB"


def format_count(count: float) -> str:
    """Three significant digits with K, M, B or T: "12", "1.24 M"."""
    for name in ("", " K", " M", " B"):
        if count < 999.5:
            return f"{count:.0f}" if not name else f"{_digits(count)}{name}"
        count /= 1000
    return f"{_digits(count)} T"


def _digits(value: float) -> str:
    """Three significant digits, in exponent form from SCIENTIFIC on."""
    if value >= SCIENTIFIC:
        return f"{value:.2e}"
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
