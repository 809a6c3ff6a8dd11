"""The mesh of devices."""

import math
import os

import jax
from jax.sharding import AxisType, Mesh

from jaxpipe.models.code import AXES


def make_mesh(stage: int, data: int = 1, model: int = 1) -> Mesh:
    """A mesh with axes (stage, data, model) over the first devices that JAX sees.

    Raises:
      ValueError: for more devices than exist, with the way to get more on a CPU.
    """
    needed, devices = stage * data * model, jax.devices()
    if needed > len(devices):
        hint = ""
        if devices[0].platform == "cpu":
            hint = f"; for virtual CPU devices set JAX_NUM_CPU_DEVICES={needed} before the start"
        raise ValueError(
            f"field 'mesh' asks for {needed} devices (stage {stage} x data {data} x model {model}), "
            f"but JAX sees {len(devices)} ({devices[0].platform}){hint}"
        )
    return jax.make_mesh((stage, data, model), AXES, (AxisType.Auto,) * 3, devices=devices[:needed])


def ask_for_virtual_devices(count: int) -> None:
    """Makes JAX split the host's CPU into so many devices, unless the environment says how many.

    Only before JAX first looks for devices.
    """
    told = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not told and "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", count)


def describe(mesh: Mesh) -> str:
    """One line about the devices of a mesh."""
    device = mesh.devices.flat[0]
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    virtual = " (virtual: they share the cores of this host)" if device.platform == "cpu" else ""
    return f"{math.prod(mesh.shape.values())} devices, {device.device_kind}{virtual}: {axes}"
