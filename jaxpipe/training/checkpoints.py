"""Asynchronous checkpoints of a training state, readable under any plan and mesh.

A state is a nested dictionary of arrays in layer order, {"params": {piece: {...}}, "mu": ..., "nu": ...,
"step": ...}; nothing in it depends on how pieces were laid out on devices. Written by one process.

A step is committed by a rename, so what a crash leaves half-written is never taken for a checkpoint. A
committed step that cannot be read (a disk that filled up, a copy that was cut off) is renamed aside,
never deleted, and the one before it is taken, with a line in the log.
"""

import itertools
import logging
import os
import re
import textwrap
from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import LatestN

State = dict[str, Any]
"""A nested dictionary of jax.Array, or of jax.ShapeDtypeStruct with shardings where it is abstract."""

ASIDE = "unreadable-"
"""Prefix of the folders of committed steps that could not be read."""

logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints in a folder, of which the newest `keep` are kept.

    Raises:
      ValueError: when the folder cannot be made or written to.
    """

    def __init__(self, folder: Path | str, keep: int):
        self._folder = Path(folder).absolute()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            probe = self._folder / f".writable-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ValueError(
                f"cannot write checkpoints to {str(self._folder)!r}: {error.strerror}"
            ) from error
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(preservation_policy=LatestN(keep)),
            item_handlers=ocp.StandardCheckpointHandler(),
        )

    def steps(self) -> list[int]:
        """Committed steps, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: State) -> None:
        """Starts to save `state`, whose arrays may be donated or deleted as soon as this returns.

        An earlier save still under way is waited for, and what went wrong in it is raised here.
        """
        self._manager.save(step, args=ocp.args.StandardSave(state), force=True)

    def restore_latest(self, abstract: State) -> tuple[int, State] | None:
        """The newest readable step and its state with the shardings of `abstract`; None in a new folder.

        Raises:
          ValueError: when the newest readable step holds other parameters (the first that differs is
            named), when a sharding does not fit its array, or when no step is left that can be read.
        """
        _check_shardings(abstract)
        for step in reversed(self.steps()):
            try:
                saved = self._read_shapes(step)
                difference = first_difference(saved, abstract)
                restored = None if difference else self._restore(step, abstract)
            except Exception as error:
                if not _means_damage(error):
                    raise
                self._put_aside(step, error)
                continue
            if difference:
                raise ValueError(f"checkpoint {str(self._folder / str(step))!r}: {difference}")
            return step, restored
        if broken := sorted(path.name for path in self._folder.glob(f"{ASIDE}*")):
            raise ValueError(
                f"no checkpoint in {str(self._folder)!r} can be read (renamed: {', '.join(broken)}); "
                "put a good copy of a step there, or start again with another workdir"
            )
        return None

    def wait(self) -> None:
        """Waits until the last save is committed."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for the last save and releases the folder."""
        self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _read_shapes(self, step: int) -> State:
        metadata = self._manager.item_metadata(step)
        if metadata is None or not metadata.tree:
            raise ValueError("its metadata is missing or empty")
        return metadata.tree

    def _restore(self, step: int, abstract: State) -> State:
        return self._manager.restore(step, args=ocp.args.StandardRestore(abstract))

    def _put_aside(self, step: int, error: Exception) -> None:
        names = (f"{ASIDE}{step}{'-again' * times}" for times in itertools.count())
        aside = next(path for path in map(self._folder.joinpath, names) if not path.exists())
        (self._folder / str(step)).rename(aside)
        self._manager.reload()
        logger.error(
            "checkpoint of step %d cannot be read; renamed to %s, going on with the one before it (%s)",
            step,
            aside,
            _reason(error),
        )


def first_difference(saved: State, expected: State) -> str | None:
    """One line about the first leaf that only one of the states has or that differs in shape or dtype."""
    leaves_saved, leaves_expected = _leaves(saved), _leaves(expected)
    for name in [*leaves_expected, *leaves_saved]:
        if name not in leaves_saved:
            return f"{name!r} is in the model but not in the checkpoint"
        if name not in leaves_expected:
            return f"{name!r} is in the checkpoint but not in the model"
        found, wanted = leaves_saved[name], leaves_expected[name]
        if found != wanted:
            return f"{name!r} is {found} in the checkpoint but {wanted} in the model"
    return None


def _leaves(tree: State) -> dict[str, str]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {_name(path): f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" for path, leaf in flat}


def _check_shardings(abstract: State) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(abstract)[0]:
        if leaf.sharding is None:
            raise ValueError(f"{_name(path)!r} has no sharding to be restored with")
        try:
            leaf.sharding.shard_shape(leaf.shape)
        except ValueError as error:
            raise ValueError(f"{_name(path)!r} cannot be restored as {leaf}: {error}") from error


def _means_damage(error: BaseException) -> bool:
    """Whether `error`, or what caused it, is what damaged files make Orbax and TensorStore raise.

    TensorStore raises ValueError for everything, with the status first in its message; Orbax raises a
    bare Exception, caused by such a ValueError, when the data of an array cannot be read. Lack of
    memory or of permission says nothing about the files.
    """
    chain = []
    while error is not None:
        chain.append(error)
        error = error.__cause__
    damage = (ValueError, KeyError, EOFError, FileNotFoundError, NotADirectoryError)
    innocent = ("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAVAILABLE")
    if any(isinstance(e, PermissionError | MemoryError) or str(e).startswith(innocent) for e in chain):
        return False
    return any(isinstance(e, damage) for e in chain)


def _reason(error: BaseException) -> str:
    """What is wrong in one short line: of the first cause, without paths and what TensorStore was doing."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).partition(" [tensorstore_spec=")[0].partition("\n")[0]
    text = re.sub(r'( in OCDBT database at| of)? local file "[^"]*"', "", text)
    text = re.sub(r"^([A-Z_]+: )?(Error [^:]*: )*", "", text)
    return textwrap.shorten(f"{type(error).__name__}: {text}", 120, placeholder=" ...")


def _name(path) -> str:
    return "/".join(str(key.key) for key in path)
