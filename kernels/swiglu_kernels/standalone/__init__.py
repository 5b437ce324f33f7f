"""Kernels compiled or run by themselves, for `inspect` and `tune`."""
