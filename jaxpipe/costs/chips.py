"""Chips: what the analytic cost table knows of the hardware."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """Peak rates of one device.

    matmul_flops: dense matrix operations a second by dtype name (float32: TF32 on GPUs).
    vector_flops: elementwise operations a second.
    memory_bandwidth: bytes a second from and to device memory.
    memory_bytes: size of device memory; None where devices share the host's.
    link_bandwidth: bytes a second to another device, one way.
    link_latency: seconds before the first byte arrives.
    """

    matmul_flops: dict[str, float]
    vector_flops: float
    memory_bandwidth: float
    memory_bytes: int | None
    link_bandwidth: float
    link_latency: float


CHIPS = {
    "h100": Chip({"bfloat16": 989e12, "float32": 494e12}, 67e12, 3.35e12, 84_942_979_072, 450e9, 5e-6),
    "h200": Chip({"bfloat16": 989e12, "float32": 494e12}, 67e12, 4.8e12, 151_397_597_184, 450e9, 5e-6),
    "h20": Chip({"bfloat16": 148e12, "float32": 74e12}, 44e12, 4.0e12, 102_005_473_280, 450e9, 5e-6),
    "a100": Chip({"bfloat16": 312e12, "float32": 156e12}, 19.5e12, 2.039e12, 85_031_714_816, 300e9, 5e-6),
    # One core with AVX2; virtual devices share the host's memory and exchange messages by copying.
    "cpu": Chip({"bfloat16": 20e9, "float32": 40e9}, 2e9, 10e9, None, 5e9, 50e-6),
}
"""By name. GPUs: the SXM versions' data sheets, memory as CUDA reports it; link: NVLink, one way."""

MATMUL_EFFICIENCY = 0.6
"""Share of the peak matrix rate that large matmuls reach."""

MEMORY_EFFICIENCY = 0.8
"""Share of the peak memory bandwidth that elementwise passes reach."""
