"""Doing it: the executor, parameter layout and meshes."""
