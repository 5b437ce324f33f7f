"""The functions that timing and other models rely on, recorded before any contender's code has run."""

from __future__ import annotations

import pkgutil

_WATCHED = (
    "time.perf_counter", "time.sleep", "torch.cuda.synchronize", "torch.cuda.current_stream", "torch.cuda._sleep",
    "torch.cuda.Event", "torch.cuda.Event.record", "torch.cuda.Event.query", "torch.cuda.Event.synchronize",
    "torch.cuda.Event.elapsed_time", "torch.equal", "torch.isfinite", "torch.Tensor.norm", "torch.Tensor.to",
    "torch.autograd.backward", "torch.nn.functional.silu", "torch.nn.functional.linear", "torch.nn.functional.gelu",
    "torch.nn.functional.softmax", "torch.nn.functional.scaled_dot_product_attention",
    "torch.nn.functional.cross_entropy", "torch.matmul", "torch.mm", "torch.addmm", "torch.sigmoid", "torch.mul",
    "torch.add", "torch.empty", "torch.zeros", "torch.Tensor.__matmul__", "torch.Tensor.__mul__",
    "torch.Tensor.__add__", "torch.Tensor.backward",
)  # fmt: skip
_PLACES = {name: (pkgutil.resolve_name(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in _WATCHED}
_REAL = {name: getattr(*place, None) for name, place in _PLACES.items()}


def put_back() -> list[str]:
    """Restore the functions that were replaced since this module was imported, and return their names."""
    replaced = [name for name, place in _PLACES.items() if getattr(*place, None) is not _REAL[name]]
    for name in replaced:
        setattr(*_PLACES[name], _REAL[name])
    return replaced
