"""Which hand-scheduled kernels may run: those that `python -m swiglu_kernels.check` found right and fast.

They ask more of the compiler than a portable kernel does, and another release of Triton may break them. So each runs
only under a Triton with which that check admitted it on a GPU: `admitted.json`, which ships with this package, has the
verdicts of releases that were tried, for every card of compute capability 9.0, since the machine code is the same; a
file in the user's cache folder has those of this machine, for one Triton, torch, GPU and digest of these sources, and
comes first. Without a verdict the portable kernels run, and one warning names the command.
"""

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from swiglu_kernels.runtime import kept, sources
from swiglu_kernels.runtime.backend import capability_of, card_of, triton

KERNELS = {
    "forward": "swiglu_glu and swiglu_mlp, from 129 tokens on",
    "transposed forward": "the same, where few hundred tokens fill its tiles better",
    "row forward": "the same, up to 128 tokens",
    "dX": "gradient of x",
    "dW": "gradients of weights",
    "hidden gradient": "gradients of gate and up behind a product with w_down",
    "fp8 forward": "swiglu_glu_fp8 and swiglu_mlp_fp8",
    "experts": "swiglu_experts",
    "fp8 experts": "swiglu_experts in fp8",
}
"""Each is admitted or refused for itself."""
VARIABLE = "SWIGLU_KERNELS_BY_HAND"
"""`off` runs none of these kernels, `on` all of them unchecked; read at import."""
COMMAND = "python -m swiglu_kernels.check"
SCHEMA = 1
WHAT = "verdicts"
SHIPPED = Path(__file__).with_name("admitted.json")
INSTEAD = f"no verdict is taken from it. Delete it; `{COMMAND}` writes another."


@dataclass(frozen=True)
class Verdicts:
    """What one run of the check found."""

    triton: str
    torch: str
    gpu: str
    sources: str
    """Digest of the kernels' sources."""
    at: str
    """UTC, ISO 8601."""
    kernels: dict[str, dict[str, Any]]
    """By name: `refused`, "" where a kernel is admitted; the other figures are for readers, see `check/`."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What there is one set of verdicts for."""
        return self.triton, self.torch, self.gpu, self.sources

    def refused(self, kernel: str) -> str:
        """Why a kernel is not admitted; "" where it is."""
        return str(self.kernels.get(kernel, {"refused": "it was not checked"})["refused"])


def triton_version() -> str:
    """The version of Triton, "" without one."""
    return str(getattr(triton, "__version__", ""))


def file() -> Path | None:
    """Where verdicts of this machine are kept."""
    return kept.path("admitted.json")


def of_content(content: dict[str, Any]) -> list[Verdicts]:
    """Make verdicts of a file's content. Raises ValueError, TypeError or KeyError where it is none."""
    if content["schema"] != SCHEMA:
        raise ValueError(f"it is not of schema {SCHEMA}")
    found = [Verdicts(**plain) for plain in content["verdicts"]]
    for verdicts in found:
        if not all(isinstance(result["refused"], str) for result in verdicts.kernels.values()):
            raise ValueError("a verdict is not a text")
    return found


def shipped(version: str) -> Verdicts | None:
    """Return the verdicts that ship for a version of Triton: a kernel has to have passed on every card that ran it."""
    of_version = [verdicts for verdicts in kept.read(SHIPPED, WHAT, of_content) if verdicts.triton == version]
    if not of_version:
        return None
    first, *others = of_version
    refused = {name: next(filter(None, (verdicts.refused(name) for verdicts in of_version)), "") for name in KERNELS}
    return replace(first, kernels={name: {"refused": why} for name, why in refused.items()}) if others else first


@functools.cache
def _verdicts(gpu: str) -> Verdicts | None:
    """The verdicts that hold for a GPU: this machine's, else the shipped ones; those alone for "", no GPU."""
    found: list[Verdicts] = kept.read_if_sound(file(), WHAT, of_content, INSTEAD) if gpu else []
    if found:
        here = triton_version(), torch.__version__, gpu, sources.of_kernels()
        for verdicts in found:
            if verdicts.key == here:
                return verdicts
    return shipped(triton_version())


def keep(found: Verdicts, place: Path) -> None:
    """Add verdicts to a file, in place of earlier ones of the same Triton, torch, GPU and sources. Raises OSError."""
    try:
        others = kept.read(place, WHAT, of_content)
    except ValueError:  # not a file of verdicts
        others = []
    others = [verdicts for verdicts in others if verdicts.key != found.key]
    kept.write(place, {"schema": SCHEMA, "verdicts": [vars(verdicts) for verdicts in (*others, found)]})
    _verdicts.cache_clear()


_BY_ENVIRONMENT: dict[str, list[str | None]] = {"off": [f"{VARIABLE}=off"], "on": [None]}
_override = _BY_ENVIRONMENT.get(os.environ.get(VARIABLE, ""), [])
"""While it is not empty, its last element is the answer for all kernels."""


def why_aside(kernel: str | None = None) -> str | None:
    """Say why a kernel, or all of them, may not run under this Triton, or return None.

    Whether a verdict of this machine is asked for depends on the current GPU; where there is none, as where launches
    are only compiled, the shipped ones answer.
    """
    if _override:
        return _override[-1]
    gpu = _hopper_gpu()
    verdicts = _verdicts(gpu)
    if verdicts is None:
        version = triton_version() or "(none)"
        reason = f"the hand-scheduled ones were not checked with Triton {version}: `{COMMAND}` does"
        if gpu:
            _warn_once(reason)
        return reason
    refused = verdicts.refused(kernel) if kernel else ""
    return f"the check has refused {kernel!r} with Triton {verdicts.triton}: {refused}" if refused else None


def _hopper_gpu() -> str:
    """The name of the current GPU if these kernels are made for it, "" where nothing has used a GPU yet."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return ""
    device = torch.device("cuda", torch.cuda.current_device())
    return card_of(device) if (capability_of(device) or (0,))[0] == 9 else ""


@functools.cache
def _warn_once(reason: str) -> None:
    text = f"the portable kernels run, because {reason}, once and in some two minutes"
    warnings.warn(f"swiglu_kernels: {text}", stacklevel=3)


@contextlib.contextmanager
def by_hand_aside(reason: str | None) -> Iterator[None]:
    """Describe launches as if these kernels ran with no version of Triton, for a reason; None: with every one."""
    _override.append(reason)
    try:
        yield
    finally:
        _override.pop()
