import json

import pytest

from jaxpipe.training.config import to_json
from jaxpipe.training.workdir import open_workdir
from tests.training.runs import tiny_config

CONFIG = tiny_config("somewhere")


def test_makes_the_folder_and_writes_the_configuration(tmp_path):
    workdir = tmp_path / "a" / "b"
    assert open_workdir(workdir, CONFIG) == []
    assert json.loads((workdir / "config.json").read_text()) == json.loads(json.dumps(to_json(CONFIG)))
    assert [path.name for path in workdir.iterdir()] == ["config.json"]


def test_the_same_configuration_is_welcome(tmp_path):
    open_workdir(tmp_path, CONFIG)
    assert open_workdir(tmp_path, CONFIG) == []


def test_mesh_plan_and_logging_may_change(tmp_path):
    open_workdir(tmp_path, CONFIG)
    changes = {
        "mesh": {"stage": 2, "data": 2},
        "plan": {"schedule": "gpipe", "partition": "even", "recompute": "full", "chip": "h100"},
        "batch": {"microbatches": 2},
        "train": {
            "log_every": 1,
            "eval_every": 4,
            "eval_batches": 1,
            "checkpoint_every": 5,
            "checkpoints_to_keep": 9,
        },
    }
    other = tiny_config("somewhere", **changes)
    lines = open_workdir(tmp_path, other)
    assert {line.partition(":")[0] for line in lines} == {
        f"{section}.{field}" for section, fields in changes.items() for field in fields
    }
    assert "mesh.stage: 4 -> 2" in lines
    assert open_workdir(tmp_path, other) == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"optimizer": {"learning_rate": 0.5}}, "optimizer.learning_rate: 0.01 -> 0.5"),
        ({"seed": 3}, "seed: 0 -> 3"),
        ({"model": {"layers": 3}}, "model.layers: 2 -> 3"),
        ({"data": {"sequence_length": 32}}, "data.sequence_length: 16 -> 32"),
        ({"batch": {"global_batch": 16}}, "batch.global_batch: 8 -> 16"),
        ({"train": {"steps": 7}}, "train.steps: 6 -> 7"),
        ({"dtype": "bfloat16"}, "dtype: 'float32' -> 'bfloat16'"),
    ],
)
def test_what_changes_the_result_may_not(tmp_path, changes, line):
    open_workdir(tmp_path, CONFIG)
    before = (tmp_path / "config.json").read_text()
    with pytest.raises(ValueError) as error:
        open_workdir(tmp_path, tiny_config("somewhere", mesh={"stage": 2}, **changes))
    assert str(error.value) == (
        f"{tmp_path} belongs to another configuration: {line}. "
        "Take another --workdir, or the configuration that it was started with"
    )
    assert (tmp_path / "config.json").read_text() == before


@pytest.mark.parametrize(
    ("name", "reason"), [("file", "it is a file; expected a folder"), ("file/below", "Not a directory")]
)
def test_a_file_in_the_way(tmp_path, name, reason):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=rf"^cannot write to workdir .*/{name}: {reason}$"):
        open_workdir(tmp_path / name, CONFIG)


@pytest.mark.parametrize(
    ("text", "words"), [('{"mesh": ', r"config\.json is not JSON \("), ("[1]", "is no JSON object")]
)
def test_a_foreign_config_file_is_kept(tmp_path, text, words):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        open_workdir(tmp_path, CONFIG)
    assert (tmp_path / "config.json").read_text() == text
