"""Accelerator kernels, one folder an operation. Imports nothing of jaxpipe."""
