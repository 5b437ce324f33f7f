"""Implementations as `--impl file.py:name` brings them."""

import dataclasses

from swiglu_bench.cases.implementation import Implementation


def from_file(one: Implementation) -> Implementation:
    """As `--impl file.py:name` brings it: without its code."""
    return dataclasses.replace(one.declared(), address=f"{one.file}:{one.name}")
