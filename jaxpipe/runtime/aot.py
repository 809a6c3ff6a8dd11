"""GPUs that are not here: a mesh of them that programs can be compiled for on any machine."""

import re
from importlib import metadata
from math import prod
from pathlib import Path

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from jaxpipe.models.code import AXES

_H200 = Path(__file__).with_name("gpu_targets") / "h200.txtpb"
_H200_VALUES = {
    "device_memory_size": "151397597184",
    "memory_bandwidth": "4800000000000",
    "device_description_str": '"NVIDIA H200"',
}
TARGETS = {
    "h100": {
        "device_memory_size": "84942979072",
        "memory_bandwidth": "3352320000000",
        "device_description_str": '"NVIDIA H100 80GB HBM3"',
    },
    "h200": _H200_VALUES,
}
"""By chip, where its target differs from the H200's: the H100 is the same die with less and slower memory."""

PACKAGES = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm")
"""What compiles for NVIDIA GPUs; the first two must be of JAX's version."""

OPTIONS = {
    # Triton's matmuls are chosen by timing them, which takes a GPU.
    "xla_gpu_enable_triton_gemm": False,
    # What is kept and what is computed again is the plan's decision.
    "xla_disable_hlo_passes": "rematerialization",
}
"""Compiler options for absent GPUs, on top of those for GPUs."""


def absent_mesh(chip: str, topology: str, stage: int, data: int = 1, model: int = 1) -> Mesh:
    """A mesh with axes (stage, data, model) of GPUs that need not exist.

    Args:
      chip: a name of TARGETS.
      topology: partitions x hosts x GPUs of a host, as in "1x1x8".

    Raises:
      ValueError: unknown chip, malformed topology, or one with more or fewer GPUs than the mesh.
      ModuleNotFoundError: packages are missing, or of another version than JAX; with the command that
        installs them.
    """
    text = target_text(chip)
    _check_topology(topology, stage, data, model)
    _check_packages()
    description = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=text, topology=topology
    )
    devices = np.array(description.devices).reshape(stage, data, model)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 3)


def target_text(chip: str) -> str:
    """XLA's description of a chip, a GpuTargetConfigProto as text.

    Raises:
      ValueError: for an unknown chip.
    """
    if chip not in TARGETS:
        raise ValueError(f"chip {chip!r} is unknown as a compile target; known: {', '.join(TARGETS)}")
    text = _H200.read_text()
    for field, value in TARGETS[chip].items():
        text = text.replace(f"{field}: {_H200_VALUES[field]}", f"{field}: {value}")
    return text


def _check_topology(topology: str, stage: int, data: int, model: int) -> None:
    needed = stage * data * model
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", topology):
        raise ValueError(
            f"topology is {topology!r}; expected PARTITIONSxHOSTSxGPUS (GPUS of one host), "
            f"as in '1x1x{needed}'"
        )
    found = prod(map(int, topology.split("x")))
    if found != needed:
        raise ValueError(
            f"topology {topology!r} has {found} GPUs, but field 'mesh' asks for {needed} "
            f"(stage {stage} x data {data} x model {model})"
        )


def _check_packages() -> None:
    wrong = []
    for package in PACKAGES:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            wrong.append(package)
        else:
            if package.startswith("jax-") and version != jax.__version__:
                wrong.append(f"{package}=={jax.__version__} (found {version})")
    if wrong:
        raise ModuleNotFoundError(
            f"compiling for absent GPUs needs {', '.join(wrong)}; "
            "install with: pip install --no-deps -r requirements-aot.txt (make aot does, in .venv-aot)"
        )
