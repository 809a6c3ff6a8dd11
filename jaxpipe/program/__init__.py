"""Step by step: a plan lowered to ticks over registers. Never imports JAX."""
