"""Implementations as `--impl file.py:name` brings them."""

import dataclasses

import deadly_implementations as deadly
import user_implementations as mine

from swiglu_bench.spec.implementation import Implementation


def from_file(thing: Implementation) -> Implementation:
    """As `--impl file.py:name` brings it: without its code."""
    module = deadly if thing in vars(deadly).values() else mine
    return dataclasses.replace(thing.declared(), address=f"{module.__file__}:{thing.name}")
