"""Triton's interpreter without two costs that make most of its time for small tensors.

It checks every sum of 32-bit integers for overflow by another one in 64 bits (kernels of `verify` in the tests of the
command line still run with that check, in their own processes), and patches `triton.language` anew for each device
function of a launch.
"""

import dataclasses
from typing import Any


def quicken() -> None:
    """Change the interpreter of this process."""
    from triton import language
    from triton.runtime import interpreter

    builder: Any = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    patch: Any = interpreter._patch_lang
    scopes: dict[frozenset[str], Any] = {}

    def patch_once(fn: Any) -> Any:
        seen = [value for value in fn.__globals__.values() if value is language or value is language.core]
        modules = frozenset(module.__name__ for module in seen)
        if modules in scopes:
            return None  # a device function's, which Triton does not ask to restore
        scope = scopes[modules] = patch(fn)
        if len(scopes) == 1:  # the kernel's
            own = scope.restore

            def restore() -> None:
                nested = list(scopes.values())[1:]
                scopes.clear()
                for one in reversed(nested):
                    one.restore()
                own()

            scope.restore = restore
        return scope

    interpreter._patch_lang = patch_once
