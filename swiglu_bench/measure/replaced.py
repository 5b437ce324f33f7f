"""The functions that time and synchronisation rest on, remembered before any contender's code has run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

_WATCHED: tuple[tuple[str, Any, str], ...] = (
    ("time.perf_counter", time, "perf_counter"),
    ("time.sleep", time, "sleep"),
    ("torch.cuda.synchronize", torch.cuda, "synchronize"),
    ("torch.cuda.current_stream", torch.cuda, "current_stream"),
    ("torch.cuda._sleep", torch.cuda, "_sleep"),
    ("torch.cuda.Event", torch.cuda, "Event"),
    *(
        (f"torch.cuda.Event.{name}", torch.cuda.Event, name)
        for name in ("record", "query", "synchronize", "elapsed_time")
    ),
    ("torch.equal", torch, "equal"),
    ("torch.isfinite", torch, "isfinite"),
    ("torch.Tensor.norm", torch.Tensor, "norm"),
    ("torch.Tensor.to", torch.Tensor, "to"),
    ("torch.autograd.backward", torch.autograd, "backward"),
)

_ORIGINALS: dict[str, Callable[..., Any] | None] = {name: getattr(owner, key, None) for name, owner, key in _WATCHED}


def put_back() -> list[str]:
    """Names of the functions that somebody has replaced since this module was imported; they are put back."""
    replaced = [watched for watched in _WATCHED if getattr(watched[1], watched[2], None) is not _ORIGINALS[watched[0]]]
    for name, owner, key in replaced:
        setattr(owner, key, _ORIGINALS[name])
    return [name for name, _, _ in replaced]
