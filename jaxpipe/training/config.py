"""The resolved configuration of a training run, and the checks that need nothing else.

A configuration file gives a tree of plain values; `from_config_dict` turns it into the frozen `Config`
or raises ValueError with one line that names the field, what it holds and what would be right.
"""

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ml_collections import ConfigDict

from jaxpipe.costs.chips import CHIPS
from jaxpipe.models.families import FAMILIES
from jaxpipe.planning.named import NAMED, check_numbers
from jaxpipe.planning.plan import POLICIES
from jaxpipe.planning.schedules import SCHEDULES
from jaxpipe.program.choose import OPS
from jaxpipe.training.fields import build, check_limits, checked, default_tree, limited, plain, unknown_field

BYTES = 256
"""Tokens are bytes, so a vocabulary must hold at least this many."""
TUNED = "tuned"
"""In place of the name of a schedule: search for the best plan."""


@dataclass(frozen=True)
class DataConfig:
    """Which bytes are trained on.

    corpus: "stdlib" (the sources of Python's standard library), a folder or a file.
    suffixes: files of a folder that count as text.
    sequence_length: tokens in a sequence.
    holdout_every: every n-th file is held out for evaluation.
    """

    corpus: str = "stdlib"
    suffixes: tuple[str, ...] = (".py", ".txt", ".md")
    sequence_length: int = limited(256, at_least=1)
    holdout_every: int = limited(10, at_least=2)


@dataclass(frozen=True)
class BatchConfig:
    """global_batch: sequences in a step; microbatches: equal parts a data shard runs them in."""

    global_batch: int = limited(32, at_least=1)
    microbatches: int = limited(8, at_least=1)


@dataclass(frozen=True)
class MeshConfig:
    """Devices on each mesh axis."""

    stage: int = limited(1, at_least=1)
    data: int = limited(1, at_least=1)
    model: int = limited(1, at_least=1)


@dataclass(frozen=True)
class PlanConfig:
    """How the pieces are laid out on the stages.

    schedule: a name of `NAMED`, "tuned" to search for the best plan, or a plan.json.
    partition: "balanced" by cost or "even" by number of pieces; this and recompute count only for schedules
      of `SCHEDULES`, as the others choose them.
    recompute: a policy for every piece ("none"), or by kind ("mamba=full,mlp=none"; others "none").
    chip: the chip whose roofline gives the costs.
    slots: "static" (every parameter slot has ops of its own), "stacked" (the slots of a kind share them) or
      "auto".
    patterns: at most so many sets of permutes that a tick may choose from; 0 lets the planner choose.
    """

    schedule: str = "1f1b"
    partition: str = limited("balanced", choices=("balanced", "even"))
    recompute: str = "none"
    chip: str = limited("cpu", choices=tuple(CHIPS))
    slots: str = limited("auto", choices=("auto", "static", "stacked"))
    patterns: int = limited(0, at_least=0, at_most=OPS)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, gradients clipped to a norm.

    The rate rises linearly and falls along a cosine to `final_fraction * learning_rate`.
    """

    learning_rate: float = limited(1e-3, above=0)
    warmup_steps: int = limited(50, at_least=0)
    final_fraction: float = limited(0.1, at_least=0, at_most=1)
    weight_decay: float = limited(0.1, at_least=0)
    b1: float = limited(0.9, at_least=0, below=1)
    b2: float = limited(0.95, at_least=0, below=1)
    eps: float = limited(1e-8, above=0)
    clip_norm: float = limited(1.0, above=0)


@dataclass(frozen=True)
class TrainConfig:
    """In steps: the run's length and how often it reports, evaluates (on `eval_batches` batches), saves."""

    steps: int = limited(600, at_least=1)
    log_every: int = limited(10, at_least=1)
    eval_every: int = limited(100, at_least=1)
    eval_batches: int = limited(8, at_least=1)
    checkpoint_every: int = limited(100, at_least=1)
    checkpoints_to_keep: int = limited(3, at_least=1)


@dataclass(frozen=True)
class Config:
    """Everything that defines a run.

    family: key into `FAMILIES`; model: an instance of that family's dataclass.
    dtype: of activations and of the parameters' compute copy; master parameters are float32.
    """

    family: str
    model: Any
    seed: int = limited(0, at_least=0, below=2**32)
    dtype: str = limited("float32", choices=("float32", "bfloat16"))
    data: DataConfig = DataConfig()
    batch: BatchConfig = BatchConfig()
    mesh: MeshConfig = MeshConfig()
    plan: PlanConfig = PlanConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()


def from_config_dict(values: ConfigDict | Mapping) -> Config:
    """Checks a tree of plain values and resolves it; fields left out take their defaults.

    Raises:
      ValueError: one line naming a field that is unknown, missing, of a wrong type or out of range.
    """
    tree = dict(values.to_dict() if isinstance(values, ConfigDict) else values)
    known = _top_level_fields()
    for name in tree:
        if name not in known:
            raise ValueError(unknown_field(name, known))
    family, fields = _split_model(tree.pop("model", None))
    model = _build_model(FAMILIES[family][0], fields)
    rest = {name: checked(name, value, known[name]) for name, value in tree.items()}
    config = Config(family=family, model=model, **rest)
    check_limits(config)
    _check_together(config)
    return config


def defaults(family: str) -> ConfigDict:
    """The complete tree of defaults, so that every field can be overridden on the command line.

    Fields of the family without a default are typed placeholders, to be filled by the configuration.
    """
    if family not in FAMILIES:
        raise ValueError(f"unknown model family {family!r}; known: {', '.join(FAMILIES)}")
    model = {"family": family} | default_tree(FAMILIES[family][0])
    return ConfigDict(
        {"model": model} | {n: _default_of(n, t) for n, t in _top_level_fields().items() if n != "model"}
    )


def to_json(config: Config) -> dict:
    """The resolved configuration as a JSON object; `from_config_dict` reads it back."""
    tree = plain(dataclasses.asdict(config))
    family, model = tree.pop("family"), tree.pop("model")
    return {"model": {"family": family} | model} | tree


def differences(old: Mapping, new: Mapping) -> list[str]:
    """Fields in which two results of `to_json` differ, as lines "field: old -> new"."""
    flat_old, flat_new = _flatten(old), _flatten(new)
    names = [*flat_old, *(n for n in flat_new if n not in flat_old)]
    show = {
        name: tuple(repr(f[name]) if name in f else "absent" for f in (flat_old, flat_new)) for name in names
    }
    return [f"{name}: {before} -> {after}" for name, (before, after) in show.items() if before != after]


def recompute_policies(text: str, kinds: Iterable[str] | None = None) -> dict[str, str]:
    """Parses `plan.recompute` into a policy for each of `kinds` (None: for those that `text` names).

    Raises:
      ValueError: naming an unknown policy or kind, or an entry that is not "kind=policy".
    """
    where = f"field 'plan.recompute' is {text!r}"
    if text in POLICIES:
        return dict.fromkeys(kinds or (), text)
    named = {}
    for entry in text.split(","):
        kind, equals, policy = (part.strip() for part in entry.partition("="))
        if not equals or not kind or policy not in POLICIES:
            choices = " or ".join(repr(p) for p in POLICIES)
            raise ValueError(
                f"{where}; expected {choices} for all pieces, or kind=policy pairs as in 'mamba=full'"
            )
        if kind in named:
            raise ValueError(f"{where}, which names kind {kind!r} twice; expected each kind once")
        named[kind] = policy
    if kinds is None:
        return named
    kinds = list(dict.fromkeys(kinds))
    for kind in named:
        if kind not in kinds:
            raise ValueError(f"{where}, but the model has no kind {kind!r}; its kinds: {', '.join(kinds)}")
    return dict.fromkeys(kinds, "none") | named


def _top_level_fields() -> dict[str, Any]:
    hints = typing.get_type_hints(Config)
    return {"model": dict} | {n: t for n, t in hints.items() if n not in ("family", "model")}


def _split_model(values) -> tuple[str, dict]:
    if not isinstance(values, Mapping):
        found = "is missing" if values is None else f"is {values!r} ({type(values).__name__})"
        raise ValueError(f"field 'model' {found}; expected a table with 'family' and that family's fields")
    fields = dict(values)
    family = fields.pop("family", None)
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"field 'model.family' is {family!r}; expected one of {', '.join(FAMILIES)}")
    return family, fields


def _build_model(cls: type, fields: dict) -> Any:
    try:
        return build(cls, fields, "model")
    except ValueError as error:
        if error.__cause__ is None:
            raise
        # A family knows its own field names, not where the configuration keeps them.
        message = str(error.__cause__).removeprefix(f"{cls.__name__}: ").removeprefix("field ")
        name, _, rest = message.partition(" ")
        if (name := name.strip("'")) in {f.name for f in dataclasses.fields(cls)}:
            raise ValueError(f"field 'model.{name}' {rest}") from error
        raise ValueError(f"field 'model': {message}") from error


def _check_together(config: Config) -> None:
    batch, mesh, length = config.batch, config.mesh, config.data.sequence_length
    if not config.data.corpus:
        raise ValueError("field 'data.corpus' is ''; expected 'stdlib', a folder or a file")
    parts = batch.microbatches * mesh.data
    if batch.global_batch % parts:
        raise ValueError(
            f"field 'batch.global_batch' is {batch.global_batch}; expected a multiple of {parts} "
            f"= batch.microbatches ({batch.microbatches}) * mesh.data ({mesh.data})"
        )
    if length % mesh.model:
        raise ValueError(
            f"field 'data.sequence_length' is {length}; expected a multiple of mesh.model ({mesh.model})"
        )
    if config.model.vocab < BYTES:
        raise ValueError(
            f"field 'model.vocab' is {config.model.vocab}; expected at least {BYTES}, as tokens are bytes"
        )
    recompute_policies(config.plan.recompute)
    _check_plan(config)


def _check_plan(config: Config) -> None:
    """Checks `plan.schedule` and what stands beside it, without looking at files."""
    schedule = config.plan.schedule
    if schedule in SCHEDULES:
        return
    if schedule not in NAMED and schedule != TUNED and not schedule.endswith(".json"):
        raise ValueError(
            f"field 'plan.schedule' is {schedule!r}; expected one of {', '.join(NAMED)}, {TUNED!r} or a "
            "plan.json"
        )
    for name in ("partition", "recompute"):
        value, default = getattr(config.plan, name), getattr(PlanConfig(), name)
        if value != default:
            raise ValueError(
                f"field 'plan.{name}' is {value!r}, but plan.schedule {schedule!r} chooses it; expected "
                f"{default!r}"
            )
    if schedule in NAMED:
        try:
            check_numbers(schedule, config.mesh.stage, config.batch.microbatches)
        except ValueError as error:
            raise ValueError(f"field 'plan.schedule' is {schedule!r}: {error}") from error


def _default_of(name: str, expected) -> Any:
    if dataclasses.is_dataclass(expected):
        return default_tree(expected)
    return next(f.default for f in dataclasses.fields(Config) if f.name == name)


def _flatten(tree: Mapping, path: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in tree.items():
        flat |= _flatten(value, f"{path}{name}.") if isinstance(value, Mapping) else {f"{path}{name}": value}
    return flat
