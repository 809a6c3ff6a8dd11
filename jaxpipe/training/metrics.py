"""Metrics as JSON lines, and the line a run prints about its progress."""

import json
import os
from pathlib import Path
from typing import NamedTuple, Self


class MetricsWriter:
    """Appends records `{"step": ..., ...}` to a file of JSON lines; each line is flushed at once.

    Opened at `step`, the step that the run resumes after (0 for a new run), it first drops the lines
    of later steps and a last line that was cut off, so that the file reads as one uninterrupted run.

    Raises:
      ValueError: naming the file, and the line that is not a JSON object with an integer "step".
    """

    def __init__(self, path: Path | str, step: int = 0):
        path = Path(path)
        if path.exists():
            _truncate(path, step)
        self._file = path.open("a")

    def write(self, step: int, **values: float | str) -> None:
        """Adds one line. Numbers may be NumPy or JAX scalars."""
        plain = {name: v if isinstance(v, str | int) else float(v) for name, v in values.items()}
        self._file.write(json.dumps({"step": step} | plain) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def read_metrics(path: Path | str) -> list[dict]:
    """All records of a file that `MetricsWriter` wrote, in order."""
    lines = Path(path).read_text().splitlines()
    return [_record(Path(path), number, line) for number, line in enumerate(lines, 1)]


def _record(path: Path, number: int, line: str) -> dict:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise ValueError(
            f"{path}, line {number}: expected a JSON object with an integer 'step'; found {line[:60]!r}"
        )
    return record


def _truncate(path: Path, step: int) -> None:
    lines = path.read_text().splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        del lines[-1]
    kept = [line for number, line in enumerate(lines, 1) if _record(path, number, line)["step"] <= step]
    whole = path.with_name(path.name + ".tmp")
    whole.write_text("".join(kept))
    os.replace(whole, path)


class Progress(NamedTuple):
    """What a run reports every few steps. seconds: mean wall time of a step, None while unknown."""

    step: int
    steps: int
    loss: float
    seconds: float | None
    tokens_per_step: int

    def __str__(self) -> str:
        if self.seconds is None:
            return f"step {self.step}/{self.steps} loss {self.loss:.4g}"
        remaining = format_duration((self.steps - self.step) * self.seconds)
        rate = format_count(self.tokens_per_step / self.seconds)
        return (
            f"step {self.step}/{self.steps} loss {self.loss:.4g} tokens/s {rate} "
            f"step {self.seconds:.3g} s ETA {remaining}"
        )


def format_count(value: float) -> str:
    """Three significant digits and a decimal prefix: 12345 is "12.3k"."""
    for prefix in ("", "k", "M", "G"):
        if value < 999.5 or prefix == "G":
            break
        value /= 1000
    return f"{value:.3g}{prefix}" if value < 999.5 else f"{value:.0f}{prefix}"


def format_duration(seconds: float) -> str:
    """Whole seconds as "48s", "3m12s" or "2h05m"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
