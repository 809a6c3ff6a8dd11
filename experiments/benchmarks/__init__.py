"""Benchmarks: each prints a table of measured numbers."""
