import logging
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.training import checkpoints as module
from jaxpipe.training.checkpoints import Checkpoints


def mesh_of(**axes: int) -> Mesh:
    names, sizes = tuple(axes), tuple(axes.values())
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def make_state(step: int, mesh: Mesh, spec: P) -> dict:
    """Values differ by step and leaf, so that no other state can pass for this one."""
    key = jax.random.fold_in(jax.random.key(7), step)

    def piece(i, shape, where):
        value = jax.random.normal(jax.random.fold_in(key, i), shape)
        return jax.device_put(value, NamedSharding(mesh, where))

    params = {
        "embed": {"table": piece(0, (128, 256), spec)},
        "layer_00/attention": {},
        "layer_00/mlp": {"up": {"kernel": piece(1, (8, 16), spec)}, "scale": piece(2, (8,), P())},
    }
    moments = [jax.tree.map(lambda p, n=n: p * n, params) for n in (2, 3)]
    count = jax.device_put(jnp.int32(step), NamedSharding(mesh, P()))
    return {"params": params, "mu": moments[0], "nu": moments[1], "step": count}


def abstract(state: dict) -> dict:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def assert_same(found: dict, expected: dict) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


# Orbax leaves a closed event loop behind when a read fails.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

EIGHT = {"stage": 8}


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> Path:
    """Steps 1, 2 and 3, to be copied and damaged."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    with Checkpoints(folder, keep=3) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, make_state(step, mesh_of(**EIGHT), P("stage")))
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def state_of(step: int) -> dict:
    return make_state(step, mesh_of(**EIGHT), P("stage"))


def restore(folder: Path) -> tuple[int, dict]:
    with Checkpoints(folder, keep=3) as checkpoints:
        step, state = checkpoints.restore_latest(abstract(state_of(0)))
    assert_same(state, state_of(step))
    return step, state


def test_round_trip_on_eight_devices(folder):
    step, state = restore(folder)
    assert step == 3
    assert state["params"]["embed"]["table"].sharding.spec == P("stage")


@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        ({"stage": 2}, P("stage")),
        ({"stage": 1}, P()),
        ({"stage": 2, "data": 2, "model": 2}, P("model", "stage")),
    ],
)
def test_restores_onto_another_mesh(folder, axes, spec):
    target = make_state(0, mesh_of(**axes), spec)
    with Checkpoints(folder, keep=3) as checkpoints:
        step, state = checkpoints.restore_latest(abstract(target))
    assert_same(state, state_of(step))
    for found, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(target)):
        assert found.sharding == wanted.sharding


def test_a_new_folder_has_nothing_to_restore(tmp_path):
    with Checkpoints(tmp_path / "a" / "b", keep=1) as checkpoints:
        assert checkpoints.steps() == []
        assert checkpoints.restore_latest(abstract(state_of(0))) is None


def test_keeps_the_newest(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (5, 10, 15, 20):
            checkpoints.save(step, {"step": jnp.int32(step)})
        checkpoints.wait()
        assert checkpoints.steps() == [15, 20]


def test_a_state_may_be_donated_while_it_is_saved(tmp_path):
    sharding = NamedSharding(mesh_of(**EIGHT), P("stage"))
    state = {"params": jax.device_put(jnp.zeros((8, 1 << 18)), sharding)}
    advance = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step in range(3):
            checkpoints.save(step, state)
            for _ in range(5):
                state = advance(state)
        checkpoints.wait()
        _, found = checkpoints.restore_latest(abstract(state))
    np.testing.assert_array_equal(found["params"], 10.0)


def damage(path: Path, how: str) -> None:
    if how == "delete":
        path.unlink()
    else:
        whole = path.read_bytes()
        path.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "zeros": bytes(len(whole))}[how])


def largest_file(step_folder: Path) -> Path:
    """The embedding's: small files may be left over from merging, and nothing reads them."""
    return max((p for p in step_folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


DAMAGED = {
    "metadata": lambda f: f / "default" / "_METADATA",
    "manifest": lambda f: f / "default" / "manifest.ocdbt",
    "index": lambda f: next((f / "default" / "d").iterdir()),
    "data": largest_file,
}


@pytest.mark.parametrize("how", ["delete", "cut", "empty", "zeros"])
@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_step_is_put_aside_and_the_one_before_taken(folder, caplog, what, how):
    damage(DAMAGED[what](folder / "3"), how)
    left = sorted(p.relative_to(folder / "3") for p in (folder / "3").rglob("*"))
    with caplog.at_level(logging.ERROR, logger=module.__name__):
        step, _ = restore(folder)
    assert step == 2
    (line,) = (record.message for record in caplog.records if record.name == module.__name__)
    going_on = r"going on with the one before it \(\w+: .+\)"
    assert re.match(rf"checkpoint of step 3 cannot be read; renamed to .+unreadable-3, {going_on}$", line)
    reason = line.partition(" (")[2]
    assert len(reason) < 160
    for junk in ("tensorstore_spec", "TensorStore", str(folder), "..."):
        assert junk not in reason
    aside = folder / "unreadable-3"
    assert sorted(p.relative_to(aside) for p in aside.rglob("*")) == left
    assert not (folder / "3").exists()


def test_the_same_step_can_be_saved_and_damaged_again(folder):
    for aside in ("unreadable-3", "unreadable-3-again"):
        damage(DAMAGED["metadata"](folder / "3"), "empty")
        with Checkpoints(folder, keep=3) as checkpoints:
            step, _ = checkpoints.restore_latest(abstract(state_of(0)))
            assert (step, (folder / aside).is_dir()) == (2, True)
            checkpoints.save(3, state_of(3))
    assert restore(folder)[0] == 3


def test_no_readable_step_is_an_error_and_stays_one(folder):
    for step in "123":
        damage(largest_file(folder / step), "cut")
    for _ in range(2):  # a second start must not begin anew in silence
        with Checkpoints(folder, keep=3) as checkpoints, pytest.raises(ValueError) as error:
            checkpoints.restore_latest(abstract(state_of(0)))
        names = "unreadable-1, unreadable-2, unreadable-3"
        assert f"no checkpoint in {str(folder)!r} can be read (renamed: {names})" in str(error.value)


def test_what_a_crash_leaves_before_the_commit_is_no_checkpoint(folder):
    (folder / "3").rename(folder / "3.orbax-checkpoint-tmp")
    step, _ = restore(folder)
    assert step == 2
    assert not list(folder.glob("unreadable-*"))


def without(tree: dict, *path: str) -> dict:
    name, *rest = path
    return {k: without(v, *rest) if rest and k == name else v for k, v in tree.items() if rest or k != name}


def replaced(tree: dict, leaf, *path: str) -> dict:
    name, *rest = path
    return tree | {name: replaced(tree[name], leaf, *rest) if rest else leaf}


KERNEL = ("params", "layer_00/mlp", "up", "kernel")
SOMEWHERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: without(s, *KERNEL), "is in the checkpoint but not in the model"),
        (
            lambda s: replaced(s, jax.ShapeDtypeStruct((8, 32), jnp.float32, sharding=SOMEWHERE), *KERNEL),
            r"is float32\[8,16\] in the checkpoint but float32\[8,32\] in the model",
        ),
        (
            lambda s: replaced(s, jax.ShapeDtypeStruct((8, 16), jnp.bfloat16, sharding=SOMEWHERE), *KERNEL),
            r"is float32\[8,16\] in the checkpoint but bfloat16\[8,16\] in the model",
        ),
    ],
)
def test_another_model_is_refused_and_nothing_renamed(folder, change, message):
    with Checkpoints(folder, keep=3) as checkpoints:
        with pytest.raises(ValueError, match=f"checkpoint .*3': 'params/layer_00/mlp/up/kernel' {message}"):
            checkpoints.restore_latest(change(abstract(state_of(0))))
        assert checkpoints.steps() == [1, 2, 3]


def test_a_new_parameter_is_named(folder):
    state = abstract(state_of(0))
    state["params"]["layer_01/mlp"] = state["params"]["layer_00/mlp"]
    with (
        Checkpoints(folder, keep=3) as checkpoints,
        pytest.raises(ValueError, match=r"'params/layer_01/mlp/scale' is in the model but not in the check"),
    ):
        checkpoints.restore_latest(state)


def test_a_sharding_that_does_not_fit_blames_no_checkpoint(folder):
    uneven = NamedSharding(mesh_of(stage=3), P("stage"))
    state = replaced(
        abstract(state_of(0)), jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=uneven), *KERNEL
    )
    with Checkpoints(folder, keep=3) as checkpoints:
        with pytest.raises(ValueError, match="'params/layer_00/mlp/up/kernel' cannot be restored as"):
            checkpoints.restore_latest(state)
        assert checkpoints.steps() == [1, 2, 3]


def denied() -> Exception:
    error = Exception("Encountered error while reading array index")
    error.__cause__ = ValueError("PERMISSION_DENIED: Error reading local file")
    return error


@pytest.mark.parametrize("error", [MemoryError("full"), PermissionError(13, "denied"), denied()])
def test_lack_of_memory_or_permission_blames_no_checkpoint(folder, monkeypatch, error):
    def fail(step, abstract):
        raise error

    with Checkpoints(folder, keep=3) as checkpoints:
        monkeypatch.setattr(checkpoints, "_restore", fail)
        with pytest.raises(type(error)) as raised:
            checkpoints.restore_latest(abstract(state_of(0)))
        assert raised.value is error
        assert checkpoints.steps() == [1, 2, 3]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        ValueError, match=r"cannot write checkpoints to '.*file/checkpoints': Not a directory"
    ):
        Checkpoints(tmp_path / "file" / "checkpoints", keep=1)
