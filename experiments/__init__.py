"""Entry points: absl flags and little else."""
