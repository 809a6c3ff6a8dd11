"""Cost tables: what each piece takes in time and memory. Plain data, no JAX."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

LARGEST = 1e30
"""More than any time or size may be; sums and squares of it are still finite."""
MOST_PIECES = 4096
"""More pieces are taken for a mistake: partitions take time and memory by their square."""
FORMAT = "jaxpipe-costs/1"
UNITS = ("s", "ms", "us", "unit")


@dataclass(frozen=True)
class PieceCost:
    """Costs of one piece and one micro-batch.

    F, I, W: time of forward, input gradient and weight gradient, in the table's unit.
    param_bytes: bytes of its master parameters.
    stash_bytes: bytes held from the start of F to the end of I, or of B.
    grad_stash_bytes: all bytes held from the start of I to the end of W where the two run apart. Less than
        `stash_bytes` where I frees part of the stash, more where it makes something for W. By default all of
        `stash_bytes` if W takes time, else 0.
    output_bytes: bytes that must travel when the next piece is on another device.
    """

    name: str
    kind: str
    F: float
    I: float
    W: float
    param_bytes: int = 0
    stash_bytes: int = 0
    grad_stash_bytes: int | None = None
    output_bytes: int = 0

    def __post_init__(self):
        if self.grad_stash_bytes is None:
            object.__setattr__(self, "grad_stash_bytes", self.stash_bytes if self.W > 0 else 0)

    @property
    def total(self) -> float:
        """Time of F, I and W together."""
        return self.F + self.I + self.W


@dataclass(frozen=True)
class Link:
    """A connection between neighbouring devices: a message takes latency + bytes / bytes_per_unit."""

    latency: float = 0.0
    bytes_per_unit: float = float("inf")

    def time(self, num_bytes: float) -> float:
        """Time that a message of `num_bytes` takes, in the table's unit."""
        return self.latency + num_bytes / self.bytes_per_unit


@dataclass(frozen=True)
class CostTable:
    """Costs of all pieces in order.

    unit: one of UNITS; "unit" is a time of no stated length.
    memory_limit_bytes: memory of a device, None when it does not matter.
    state_factor: resident bytes a byte of parameters stands for (master, gradient, optimizer
        state and compute copy).
    """

    unit: str
    pieces: tuple[PieceCost, ...]
    link: Link = Link()
    memory_limit_bytes: int | None = None
    state_factor: float = 1.0


def to_json(table: CostTable) -> dict:
    """The table as a JSON object (an infinite bandwidth becomes null)."""
    link = dataclasses.asdict(table.link)
    if link["bytes_per_unit"] == float("inf"):
        link["bytes_per_unit"] = None
    return {
        "format": FORMAT,
        "unit": table.unit,
        "pieces": [dataclasses.asdict(p) for p in table.pieces],
        "link": link,
        "memory_limit_bytes": table.memory_limit_bytes,
        "state_factor": table.state_factor,
    }


def from_json(data: dict) -> CostTable:
    """The inverse of `to_json`.

    Raises:
      ValueError: naming the field that is missing, unknown or of a wrong type.
    """
    if not isinstance(data, dict):
        raise ValueError(f"a cost table must be a JSON object, not {type(data).__name__}")
    if data.get("format") != FORMAT:
        raise ValueError(f"field 'format' is {data.get('format')!r}; expected {FORMAT!r}")
    known = {"format", "unit", "pieces", "link", "memory_limit_bytes", "state_factor"}
    if unknown := sorted(set(data) - known):
        raise ValueError(f"unknown fields {unknown} in a cost table; known: {sorted(known)}")
    if not isinstance(data.get("pieces"), list) or not data["pieces"]:
        raise ValueError("field 'pieces' must be a list with at least one piece")
    if (count := len(data["pieces"])) > MOST_PIECES:
        raise ValueError(f"field 'pieces' holds {count} pieces; expected at most {MOST_PIECES}")
    if (unit := data.get("unit", "unit")) not in UNITS:
        raise ValueError(f"field 'unit' is {unit!r}; expected one of {list(UNITS)}")
    pieces = tuple(_piece(i, p) for i, p in enumerate(data["pieces"]))
    names = [piece.name for piece in pieces]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"field 'pieces' holds several pieces named {repeated}; names must differ")
    limit = data.get("memory_limit_bytes")
    if limit is not None and _number("memory_limit_bytes", limit) == 0:
        raise ValueError("memory_limit_bytes is 0; expected more, or null for no limit")
    return CostTable(
        unit=unit,
        pieces=pieces,
        link=_link(data.get("link", {})),
        memory_limit_bytes=limit,
        state_factor=_number("state_factor", data.get("state_factor", 1.0)),
    )


def _check_fields(where: str, data: dict, known: type) -> None:
    if not isinstance(data, dict):
        raise ValueError(f"{where} is {data!r}; expected an object")
    names = {field.name for field in dataclasses.fields(known)}
    if unknown := sorted(set(data) - names):
        raise ValueError(f"{where}: unknown fields {unknown}; known: {sorted(names)}")


def _link(data: dict) -> Link:
    _check_fields("link", data, Link)
    numbers = {k: _number(f"link.{k}", v) for k, v in data.items() if (k, v) != ("bytes_per_unit", None)}
    if (bandwidth := numbers.get("bytes_per_unit")) is not None and bandwidth < 1 / LARGEST:
        raise ValueError(
            f"link.bytes_per_unit is {bandwidth!r}; expected at least {1 / LARGEST:g}, or null for no limit"
        )
    return Link(**numbers)


def _piece(index: int, data: dict) -> PieceCost:
    where = f"pieces[{index}]"
    _check_fields(where, data, PieceCost)
    if missing := [name for name in ("name", "kind", "F", "I", "W") if name not in data]:
        raise ValueError(f"{where}: missing fields {missing}")
    for name in ("name", "kind"):
        if not isinstance(data[name], str) or not data[name]:
            raise ValueError(f"{where}.{name} is {data[name]!r}; expected a name")
    numbers = {k: _number(f"{where}.{k}", v) for k, v in data.items() if k not in ("name", "kind")}
    return PieceCost(name=data["name"], kind=data["kind"], **numbers)


def _number(where: str, value) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= LARGEST:
        shown = text if len(text := repr(value)) <= 40 else f"{text[:40]}..."
        raise ValueError(f"{where} is {shown}; expected a number from 0 to {LARGEST:g}")
    return value


def save(table: CostTable, path: Path | str) -> None:
    """Writes the table as JSON."""
    Path(path).write_text(json.dumps(to_json(table), indent=1) + "\n")


def load(path: Path | str) -> CostTable:
    """Reads a table that `save` (or anybody else) wrote.

    Raises:
      ValueError: naming the file, and the field that is wrong; also where there is no such file.
    """
    try:
        return from_json(json.loads(Path(path).read_text("utf-8-sig")))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply; expected a cost table as JSON") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON ({error})") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
