"""How steps are compiled, by platform."""

from jax.sharding import Mesh

OPTIONS = {
    # Without the analysis, XLA copies what passes through a `switch` unchanged: the step of the tiny
    # Nemotron-H on a CPU took 3.5 times one written by hand, with it 1.08 times.
    "cpu": {"xla_cpu_copy_insertion_use_region_analysis": True},
    # The others let all permutes of a tick run beside its instructions. With a limit of 4 some did not where
    # the channels of a tick join different devices (several patterns), so that XLA cannot combine them.
    "gpu": {
        "xla_gpu_copy_insertion_use_region_analysis": True,
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 16,
    },
}


def compiler_options(mesh: Mesh) -> dict:
    """Options for `jax.jit` or `compile` of a function that runs programs on a mesh."""
    platform = mesh.devices.flat[0].platform
    return OPTIONS["gpu" if platform in ("gpu", "cuda", "rocm") else platform]
