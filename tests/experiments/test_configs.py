import importlib
import re
from pathlib import Path

import pytest

from jaxpipe.models.families import FAMILIES
from jaxpipe.training.config import differences, from_config_dict, to_json

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "experiments" / "configs").glob("[!_]*.py"))


def tree_of(name: str):
    return importlib.import_module(f"experiments.configs.{name}").get_config()


@pytest.mark.parametrize("name", NAMES)
def test_resolves_and_builds(name):
    config = from_config_dict(tree_of(name))
    model = FAMILIES[config.family][1](config.model, config.dtype)
    assert len(model.pieces) >= config.mesh.stage
    assert model.pieces[-1].losses


@pytest.mark.parametrize("name", NAMES)
def test_is_complete_so_that_every_field_can_be_overridden(name):
    tree = tree_of(name)
    resolved = to_json(from_config_dict(tree))
    assert differences(to_json(from_config_dict(tree.to_dict())), resolved) == []

    def names(node, path=""):
        for key, value in node.items():
            yield from names(value, f"{path}{key}.") if hasattr(value, "items") else [f"{path}{key}"]

    assert set(names(tree)) == set(names(resolved))


@pytest.mark.parametrize("name", NAMES)
def test_docstring_gives_the_command_and_what_to_expect(name):
    text = importlib.import_module(f"experiments.configs.{name}").__doc__
    assert f"--config=experiments/configs/{name}.py" in text
    assert re.search(r"nats? (a|per) byte|GiB a device", text)
