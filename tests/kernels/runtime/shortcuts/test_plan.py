"""Launches that are remembered, and those past Triton's handling of arguments: which arguments reach the kernel."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from replayed import StandIn, describing

from swiglu_kernels.ops.gate.formula import Formula
from swiglu_kernels.runtime import backend
from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.runtime.shortcuts import door, plan
from swiglu_kernels.runtime.shortcuts.plan import Plan
from swiglu_kernels.runtime.shortcuts.series import Series
from swiglu_kernels.standalone.workloads import DENSE, LayerTensors, dense_shapes

GRID = (3, 2, 1)


class Descriptor:
    def __init__(self, base: torch.Tensor) -> None:
        self.base, self.shape, self.strides, self.block_shape = base, [*base.shape], [*base.stride()], [2, 2]


OTHER_KINDS = [
    lambda t: t[:3],
    lambda t: t.t(),
    lambda t: t.to(torch.bfloat16),
    lambda t: torch.empty(33)[1:].view(4, 8),  # of another alignment
    lambda t: torch.empty(4, 8, device="meta"),
]


def test_another_kind_is_described_anew(kernel):
    (describe, described), (other, also_described) = describing(kernel), describing(kernel)
    tensor = torch.empty(4, 8)
    given = [(change(tensor), tensor) for change in OTHER_KINDS] + [(tensor, change(tensor)) for change in OTHER_KINDS]
    options = None, "a", Formula(limit=7.0), Formula(limit=8.0), (tensor, tensor), (tensor, None), (None, tensor)
    given += [(tensor, tensor, option) for option in options]
    for count, arguments in enumerate(given, start=1):
        plan.run(describe, *arguments)
        assert len(described) == count
    plan.run(other, tensor, tensor, None)
    assert len(also_described) == 1
    assert not kernel.launched


def test_the_precision_of_float32_products_belongs_to_the_kind(kernel, monkeypatch):
    describe, described = describing(kernel)
    for dtype in (torch.float32, torch.bfloat16):
        for precision in ("ieee", "tf32"):
            monkeypatch.setattr(plan, "float32_dot_precision", lambda precision=precision: precision)
            plan.run(describe, torch.empty(4, 8, dtype=dtype), torch.empty(4, 8, dtype=dtype))
    assert len(described) == 3


def test_a_tensor_that_is_passed_twice_says_nothing_about_the_next_call(kernel):
    describe, _ = describing(kernel)
    both, left, right = (torch.empty(4, 8) for _ in range(3))
    plan.run(describe, both, both)
    plan.run(describe, left, right)

    def call(left, right):
        plan.run(describe, left, right)
        return left.new_empty(1)

    series = Series()
    for given in ((both, both), (left, right)):
        series.call(call, given)
    expected = (left.data_ptr(), 32, right.data_ptr())
    assert (kernel.launched[0], kernel.launched[-1]) == (expected, expected)


def test_a_plan_keeps_no_tensor_alive(kernel):
    describe, described = describing(kernel, Descriptor)
    tensor = torch.empty(4, 8)
    storage = weakref.ref(tensor.untyped_storage())
    plan.run(describe, tensor, tensor)
    plan.run(describe, tensor, tensor)
    del tensor
    described.clear()
    kernel.bound.clear()
    kernel.launched.clear()
    gc.collect()
    assert storage() is None


def test_a_view_made_while_describing_is_an_error(kernel):
    describe, _ = describing(kernel, lambda tensor: tensor[1:])
    with pytest.raises(AssertionError, match="left_ptr"):
        plan.run(describe, torch.empty(4, 8), torch.empty(4, 8))


def test_what_comes_then_is_launched_again_with_the_same_new_scratch(kernel):
    def describe(left, right):
        scratch = left.new_empty(3, 5, dtype=torch.float64)
        last = Launch(kernel, (1,), {"left_ptr": scratch, "size": 2, "right_ptr": right}, num_warps=4, num_stages=2)
        arguments = {"left_ptr": left, "size": 1, "right_ptr": scratch}
        return Launch(kernel, (1,), arguments, num_warps=4, num_stages=2, then=last, scratch=scratch)

    plan.run(describe, torch.empty(4, 8), torch.empty(4, 8))
    assert [arguments["size"] for arguments in kernel.bound] == [1, 2]
    left, right, given = torch.empty(4, 8), torch.empty(4, 8), torch.empty(3, 5)
    asked: list[tuple] = []
    left.new_empty = lambda shape, dtype: asked.append((tuple(shape), dtype)) or given  # type: ignore[method-assign]
    plan.run(describe, left, right)
    assert asked == [((3, 5), torch.float64)]
    assert kernel.launched == [(left.data_ptr(), 1, given.data_ptr()), (given.data_ptr(), 2, right.data_ptr())]


class Slotted(Descriptor):
    """As a later Triton may have it: something that follows from the rest, made by the constructor."""

    __slots__ = ("handle",)

    def __init__(self, base: torch.Tensor, **_: Any) -> None:
        super().__init__(base)
        self.handle = base.data_ptr()


@pytest.mark.parametrize("kind", [Descriptor, Slotted], ids=["copied", "constructed"])
def test_descriptors_get_the_new_base_and_are_never_shared(kernel: StandIn, kind: type[Descriptor]) -> None:
    describe, _ = describing(kernel, kind)
    tensors = [torch.empty(4, 8) for _ in range(3)]
    for tensor in tensors:
        plan.run(describe, tensor, torch.empty(4, 8))
    first, second = (arguments[0] for arguments in kernel.launched)
    assert first.base is tensors[1]
    assert second.base is tensors[2]
    assert first.block_shape == second.block_shape == [2, 2]
    assert getattr(second, "handle", None) in (None, tensors[2].data_ptr())


@pytest.mark.skipif(not backend.TRITON_AVAILABLE, reason="Triton is not installed")
def test_the_installed_descriptor_holds_what_is_known():
    """Read from its source, as it cannot be imported under the interpreter's name for a kernel."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    assert set(TensorDescriptor.__dataclass_fields__) <= plan.DESCRIBES


def test_a_triton_whose_kernels_cannot_be_launched_again_is_said_so(kernel, monkeypatch):
    monkeypatch.setattr(StandIn, "Compiled", lambda _, kernel: None)
    describe, _ = describing(kernel)
    for _ in range(2):
        with pytest.warns(UserWarning, match="NoneType"):
            plan.run(describe, torch.empty(4, 8), torch.empty(4, 8))
    assert len(kernel.bound) == 2


@pytest.mark.skipif(not backend.TRITON_AVAILABLE, reason="Triton is not installed")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kernel_name", DENSE)
def test_the_launches_of_this_package_hold_their_arguments_as_they_came(kernel_name: str, biased: bool) -> None:
    describe, names = DENSE[kernel_name]
    at = LayerTensors(
        dense_shapes(3, 16, 32), lambda name, shape: torch.empty(shape) if biased or "bias" not in name else None
    )
    tensors: list[torch.Tensor] = []
    launch = describe(*(plan.apart(getattr(at, name), tensors) for name in names.split()))
    made = Plan(launch, tensors)
    values = made.arguments([tensor.clone() for tensor in tensors])
    assert len(values) == len(launch.kernel.arg_names)
    assert not any(isinstance(value, torch.Tensor) for value in made.values)


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
