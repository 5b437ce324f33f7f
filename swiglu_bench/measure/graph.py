"""A call as a CUDA graph: recorded once, replayed without the host's work for each launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

WARMUPS = 3
"""Calls before the recording, as PyTorch's notes on CUDA graphs ask, so that lazy initialisation is not recorded."""


@dataclass(frozen=True)
class Graph:
    """A recorded call."""

    replay: Callable[[], None]
    result: Any
    """What the call returned while it was recorded; a replay writes its results into the same memory."""


def capture(call: Callable[[], Any], device: torch.device) -> Graph:
    """Record `call`, whose tensors must stay where they are. Raises what the call raises, or CUDA while recording."""
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(WARMUPS):
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph):
        result = call()
    return Graph(graph.replay, result)
