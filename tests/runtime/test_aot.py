"""Meshes of absent GPUs, as far as it goes without the packages that compile for them."""

import re
from importlib import metadata

import jax
import pytest

from jaxpipe.costs.chips import CHIPS
from jaxpipe.runtime import aot

PRESENT = dict.fromkeys(aot.PACKAGES, jax.__version__)


@pytest.fixture
def installed(monkeypatch) -> dict[str, str]:
    """Versions of the packages that seem to be installed."""
    versions = dict(PRESENT)

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(aot.metadata, "version", version)
    return versions


@pytest.mark.parametrize("chip", sorted(aot.TARGETS))
def test_targets_have_the_chip_table_s_numbers(chip):
    text = aot.target_text(chip)
    found = {field: int(value) for field, value in re.findall(r"(\w+): (\d+)\b", text)}
    assert found["device_memory_size"] == CHIPS[chip].memory_bytes
    assert found["memory_bandwidth"] == pytest.approx(CHIPS[chip].memory_bandwidth, rel=1e-3)
    assert f'device_description_str: "NVIDIA {chip.upper()}' in text
    assert found["core_count"] == 132


@pytest.mark.parametrize(
    ("chip", "topology", "message"),
    [
        ("b300", "1x1x8", "chip 'b300' is unknown as a compile target; known: h100, h200"),
        (
            "h200",
            "8",
            "topology is '8'; expected PARTITIONSxHOSTSxGPUS (GPUS of one host), as in '1x1x8'",
        ),
        (
            "h200",
            "1x0x8",
            "topology is '1x0x8'; expected PARTITIONSxHOSTSxGPUS (GPUS of one host), as in '1x1x8'",
        ),
        (
            "h100",
            "1x1x4",
            "topology '1x1x4' has 4 GPUs, but field 'mesh' asks for 8 (stage 4 x data 2 x model 1)",
        ),
    ],
)
def test_what_is_wrong_with_chip_or_topology(chip, topology, message):
    with pytest.raises(ValueError) as error:
        aot.absent_mesh(chip, topology, 4, 2)
    assert str(error.value) == message


def test_missing_packages(installed):
    del installed["nvidia-nvvm"], installed["jax-cuda13-pjrt"]
    message = (
        "compiling for absent GPUs needs jax-cuda13-pjrt, nvidia-nvvm; "
        "install with: pip install --no-deps -r requirements-aot.txt (make aot does, in .venv-aot)"
    )
    with pytest.raises(ModuleNotFoundError) as error:
        aot.absent_mesh("h200", "1x1x8", 8)
    assert str(error.value) == message


def test_packages_of_another_jax(installed):
    installed["jax-cuda13-plugin"] = "0.1.2"
    message = rf"needs jax-cuda13-plugin=={re.escape(jax.__version__)} \(found 0\.1\.2\); install with"
    with pytest.raises(ModuleNotFoundError, match=message):
        aot.absent_mesh("h200", "1x1x8", 8)
