"""The loop: data, optimizer, checkpoints, metrics, trainer."""
