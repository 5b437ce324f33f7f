"""Launches past Triton's handling of arguments, with a stand-in for Triton's driver: what reaches its function in C."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.runtime.shortcuts import door, plan
from swiglu_kernels.runtime.shortcuts.plan import Plan
from swiglu_kernels.runtime.shortcuts.series import Series

GRID = (3, 2, 1)


class Descriptor:
    def __init__(self, base: torch.Tensor) -> None:
        self.base, self.shape, self.strides = base, [*base.shape], [*base.stride()]


class Launcher:
    """As Triton's: what a launch needs beside its arguments."""

    launch_cooperative_grid, launch_pdl, arg_annotations, kernel_signature = False, True, "annotations", b"signature"
    global_scratch_size = profile_scratch_size = 0


class Compiled:
    metadata = SimpleNamespace(tensordesc_meta=[None])
    src = SimpleNamespace(signature={0: "*bf16", 1: "tensordesc<bf16>", 2: "i32"})
    function, packed_metadata = 77, (4, 1, 0)

    def __init__(self) -> None:
        self.run, self.by_triton = Launcher(), list[Any]()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.by_triton.append(arguments)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What was launched and encoded, and the hooks."""
    found = SimpleNamespace(launched=[], encoded=[], enter=SimpleNamespace(calls=[]), leave=SimpleNamespace(calls=[]))

    def wrapped(launcher: Any, signature: dict[int, str], meta: list[Any]) -> Any:
        assert signature == Compiled.src.signature
        assert meta is Compiled.metadata.tensordesc_meta

        def inner(*arguments: Any) -> Any:
            expanded: list[Any] = []
            for value in arguments[-1]:
                if isinstance(value, Descriptor):
                    found.encoded.append(value.base.data_ptr())
                    expanded += [f"map of {value.base.data_ptr()}", *value.shape, *value.strides]
                else:
                    expanded.append(value)
            return launcher(expanded)

        return inner

    utils = SimpleNamespace(launch=lambda *arguments: found.launched.append(arguments))
    active = SimpleNamespace(get_current_stream=lambda device: 5, utils=utils)
    runtime = SimpleNamespace(launch_enter_hook=found.enter, launch_exit_hook=found.leave)
    for name, value in {
        "CudaLauncher": Launcher, "wrap_handle_tensordesc": wrapped, "driver": SimpleNamespace(active=active),
        "knobs": SimpleNamespace(runtime=runtime),
    }.items():  # fmt: skip
        monkeypatch.setattr(plan, name, value, raising=False)
    return found


def kept(compiled: Compiled) -> tuple[Plan, list[torch.Tensor]]:
    """A plan of a kernel with a pointer, a descriptor and a number, after its first launch."""
    tensors = [torch.empty(2, 8), torch.empty(4, 8)]
    kernel = SimpleNamespace(arg_names=("x_ptr", "w", "size"))
    arguments = {"x_ptr": tensors[0], "w": Descriptor(tensors[1]), "size": 8}
    plan = Plan(Launch(kernel, GRID, arguments, num_warps=4, num_stages=1), tensors)
    plan.keep(compiled, GRID, tensors)
    return plan, tensors


def test_addresses_are_filled_in_and_descriptors_encoded_once_for_each(sent: SimpleNamespace) -> None:
    made, tensors = kept(Compiled())
    first = len(sent.encoded)
    others = [torch.empty(2, 8), torch.empty(4, 8)]
    for given in (tensors, others, tensors, others):
        made.run(given)
        x, w = (tensor.data_ptr() for tensor in given)
        what = (77, False, True, (4, 1, 0), None, None, None, None, None, "annotations", b"signature")
        assert sent.launched.pop() == (*GRID, 5, *what, [x, f"map of {w}", 4, 8, 8, 1, 8])
    assert sent.encoded[first:] == [tensors[1].data_ptr(), others[1].data_ptr()]


def test_hooks_see_launches(sent: SimpleNamespace) -> None:
    compiled = Compiled()
    made, tensors = kept(compiled)
    sent.enter.calls.append(print)
    made.run(tensors)
    assert len(compiled.by_triton) == 1
    assert not sent.launched


@pytest.mark.parametrize("change", [{"global_scratch_size": 8}, {"gsan_enabled": True}, "other arguments"])
def test_what_needs_more_goes_triton_s_way(sent: SimpleNamespace, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = Compiled()
    if isinstance(change, dict):
        vars(compiled.run).update(change)
    else:
        monkeypatch.setattr(plan, "wrap_handle_tensordesc", lambda *_: lambda arguments: [*arguments, "one more"])
    made, tensors = kept(compiled)
    made.run(tensors)
    assert len(compiled.by_triton) == 1
    assert not sent.launched


def test_a_series_launches_by_itself(sent: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the addresses of tensors and of their parts; by their plans where a hook sees launches."""
    compiled = Compiled()
    monkeypatch.setattr(door, "_shut", False)
    monkeypatch.setattr(Launch, "run_alone", lambda _: compiled)
    plan.forget()

    def describe(x: torch.Tensor, w: torch.Tensor) -> Launch:
        arguments = {"x_ptr": x, "w": Descriptor(w), "size": 8}
        return Launch(SimpleNamespace(arg_names=("x_ptr", "w", "size")), GRID, arguments, num_warps=4, num_stages=1)

    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        made = x.new_empty(4, 8)
        plan.run(describe, x[1:], w)
        plan.run(describe, w, made)
        return made

    series = Series()
    for number in range(4):
        given = torch.empty(3, 8), torch.empty(4, 8)
        sent.launched.clear()
        encoded = len(sent.encoded)
        made = series.call(call, given)
        x, w, out = (tensor.data_ptr() for tensor in (*given, made))
        if number < 2:  # described, then recorded
            continue
        what = (*GRID, 5, 77, False, True, (4, 1, 0), None, None, None, None, None, "annotations", b"signature")
        assert sent.launched == [
            (*what, [x + 8 * 4, f"map of {w}", 4, 8, 8, 1, 8]),
            (*what, [w, f"map of {out}", 4, 8, 8, 1, 8]),
        ]
        assert set(sent.encoded[encoded:]) <= {w, out}
    sent.enter.calls.append(print)
    sent.launched.clear()
    series.call(call, given)
    assert len(compiled.by_triton) == 2
    assert not sent.launched
    plan.forget()
