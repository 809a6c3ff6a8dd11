"""jaxpipe: planned pipeline-parallel training for heterogeneous models in JAX."""
