"""Where and when: plans, schedules, partition, simulation. Never imports JAX."""
