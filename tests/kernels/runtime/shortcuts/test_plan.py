"""Launches that are remembered. Kernels are stand-ins here: what matters is which arguments reach them."""

import contextlib
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from swiglu_kernels.ops.gate.formula import PLAIN, Formula
from swiglu_kernels.ops.glu.portable_backward import input_grad_launch, weight_grad_launch
from swiglu_kernels.ops.glu.portable_forward import NO_BIASES, forward_launch, recompute_launch
from swiglu_kernels.ops.mlp.portable_mlp import down_backward_launch, down_weight_grad_launch
from swiglu_kernels.runtime import backend, internals
from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.runtime.shortcuts import door, plan, series
from swiglu_kernels.runtime.shortcuts.series import Series


class Kernel:
    """Records what it is launched with: by name through Triton's binder, by position as a compiled kernel."""

    arg_names = ("left_ptr", "size", "right_ptr")

    def __init__(self) -> None:
        self.bound: list[dict] = []
        self.launched: list[tuple] = []

    def __getitem__(self, grid):
        def bind(**arguments):
            self.bound.append(arguments)
            return self.Compiled(self)

        return bind

    class Compiled:
        def __init__(self, kernel) -> None:
            self.kernel = kernel

        def __getitem__(self, grid):
            assert len(grid) == 3
            return lambda *arguments: self.kernel.launched.append(arguments)


class Descriptor:
    def __init__(self, base: torch.Tensor) -> None:
        self.base = base
        self.block_shape = [2, 2]


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(door, "_shut", False)
    plan.forget()
    yield Kernel()
    plan.forget()


def describing(kernel, wrap=lambda tensor: tensor):
    def describe(left, right, option=None):
        described.append((left, right))
        arguments = {"left_ptr": wrap(left), "size": left.numel(), "right_ptr": right}
        return Launch(kernel, (left.shape[0],), arguments, num_warps=4, num_stages=2)

    described: list = []
    return describe, described


def test_a_second_launch_of_a_kind_fills_in_addresses(kernel):
    describe, described = describing(kernel)
    plan.run(describe, torch.empty(4, 8), torch.empty(4, 8))
    left, right = torch.empty(4, 8), torch.empty(4, 8)
    plan.run(describe, left, right)
    assert len(described) == len(kernel.bound) == 1
    assert kernel.launched == [(left.data_ptr(), 32, right.data_ptr())]


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t[:3],
        lambda t: t.t(),
        lambda t: t.to(torch.bfloat16),
        lambda t: torch.empty(33)[1:].view(4, 8),
        lambda t: torch.empty(4, 8, device="meta"),
    ],
    ids=["shape", "strides", "dtype", "alignment", "device"],
)
def test_another_kind_is_described_anew(kernel, change):
    describe, described = describing(kernel)
    same = torch.empty(4, 8)
    plan.run(describe, same, same)
    for arguments in ((change(same), same), (same, change(same))):
        plan.run(describe, *arguments)
    assert len(described) == 3
    assert not kernel.launched


def test_options_and_the_describing_function_belong_to_the_kind(kernel):
    describe, described = describing(kernel)
    other, also_described = describing(kernel)
    tensor = torch.empty(4, 8)
    for option in (None, "a", Formula(limit=7.0), Formula(limit=8.0), (tensor, tensor), (tensor, None), (None, tensor)):
        plan.run(describe, tensor, tensor, option)
    plan.run(other, tensor, tensor)
    assert (len(described), len(also_described)) == (7, 1)
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


def test_descriptors_get_the_new_base_and_are_never_shared(kernel):
    describe, _ = describing(kernel, Descriptor)
    right = torch.empty(4, 8)
    tensors = [torch.empty(4, 8) for _ in range(3)]
    for tensor in tensors:
        plan.run(describe, tensor, right)
    first, second = (arguments[0] for arguments in kernel.launched)
    assert first.base is tensors[1]
    assert second.base is tensors[2]
    assert first.block_shape == second.block_shape == [2, 2]


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


def test_plans_do_not_fill_the_memory(kernel, monkeypatch):
    monkeypatch.setattr(door, "MOST_KEYS", 3)
    describe, _ = describing(kernel)
    for rows in range(1, 9):
        plan.run(describe, torch.empty(rows, 8), torch.empty(4, 8))
        assert len(plan._plans) <= 3
    bound = len(kernel.bound)
    for rows in (6, 7, 8):  # the newest are there still
        plan.run(describe, torch.empty(rows, 8), torch.empty(4, 8))
    assert len(kernel.bound) == bound
    plan.run(describe, torch.empty(5, 8), torch.empty(4, 8))
    assert len(kernel.bound) == bound + 1


class Slotted(Descriptor):
    """As a later Triton may have it: something that follows from the rest, made by the constructor."""

    __slots__ = ("handle",)

    def __init__(self, base: torch.Tensor, block_shape: list[int] | None = None) -> None:
        super().__init__(base)
        self.handle = base.data_ptr()


def test_a_descriptor_that_holds_more_is_made_by_its_constructor(kernel):
    describe, _ = describing(kernel, Slotted)
    tensors = [torch.empty(4, 8) for _ in range(2)]
    for tensor in tensors:
        plan.run(describe, tensor, torch.empty(4, 8))
    ((descriptor, *_),) = kernel.launched
    assert descriptor.base is tensors[1]
    assert descriptor.handle == tensors[1].data_ptr()


@pytest.mark.skipif(not backend.TRITON_AVAILABLE, reason="Triton is not installed")
def test_the_installed_descriptor_holds_what_is_known():
    """Read from its source, as it cannot be imported under the interpreter's name for a kernel."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    assert set(TensorDescriptor.__dataclass_fields__) <= plan.DESCRIBES


def test_a_triton_whose_kernels_cannot_be_launched_again_is_said_so(kernel, monkeypatch):
    monkeypatch.setattr(Kernel, "Compiled", lambda _, kernel: None)
    describe, _ = describing(kernel)
    for _ in range(2):
        with pytest.warns(UserWarning, match="NoneType"):
            plan.run(describe, torch.empty(4, 8), torch.empty(4, 8))
    assert len(kernel.bound) == 2


@pytest.mark.skipif(not backend.TRITON_AVAILABLE, reason="Triton is not installed")
@pytest.mark.parametrize("biased", [False, True])
def test_the_launches_of_this_package_hold_their_arguments_as_they_came(biased):
    x, z = torch.empty(3, 16), torch.empty(3, 32)
    w, w_down, bias = torch.empty(32, 16), torch.empty(16, 32), torch.empty(32)
    biases = (bias, bias) if biased else NO_BIASES
    for describe, *arguments in (
        (forward_launch, x, w, w, z, None, None, biases, PLAIN),
        (forward_launch, x, w, w, z, (z, z), None, biases, PLAIN),
        (recompute_launch, z, x, w, w, z, z, None, biases, PLAIN),
        (input_grad_launch, z, z, z, w, w, x),
        (input_grad_launch, None, z, z, w, w, x),
        (weight_grad_launch, z, z, z, x, w, w),
        (weight_grad_launch, None, z, z, x, w, w),
        (down_backward_launch, x, w_down, (z, z), z, z, z, None, PLAIN),
        (down_backward_launch, x, w_down, (z, z), z, z, None, None, PLAIN),
        (down_weight_grad_launch, x, z, w_down),
    ):
        tensors: list[torch.Tensor] = []
        launch = describe(*(plan.apart(argument, tensors) for argument in arguments))
        made = plan.Plan(launch, tensors)
        values = made.arguments([tensor.clone() for tensor in tensors])
        assert len(values) == len(launch.kernel.arg_names)
        assert not any(isinstance(value, torch.Tensor) for value in made.values)


def test_a_series_fills_in_addresses_and_calls_nothing(kernel, monkeypatch):
    called = []

    def describe(left, right):
        right = right[0] if isinstance(right, tuple) else right
        arguments = {"left_ptr": left, "size": left.numel(), "right_ptr": right}
        return Launch(kernel, (1,), arguments, num_warps=4, num_stages=2)

    def call(left, right):
        called.append(left)
        between, out = left.new_empty(left.shape), left.new_empty(2, 3, dtype=torch.float64)
        plan.run(describe, left, between)
        plan.apply(torch.Tensor.fill_, out, 7.0)
        plan.run(describe, between[1:], (right,))
        return out, None, left.new_empty(0)

    series = Series()
    series.call(call, (torch.empty(4, 8), torch.empty(4, 8)))
    kernel.launched.clear()
    monkeypatch.setattr(plan, "key_of", lambda arguments: pytest.fail("the kind of a launch is known"))
    left, right = torch.empty(4, 8), torch.empty(4, 8)
    out, nothing, empty = series.call(call, (left, right))
    (first, last) = kernel.launched
    assert (first[0], last[2]) == (left.data_ptr(), right.data_ptr())
    assert last[0] == first[2] + 8 * 4, "a view of what was allocated"
    assert torch.equal(out, torch.full((2, 3), 7.0, dtype=torch.float64))
    assert nothing is None
    assert empty.shape == (0,)
    assert len(called) == 1


@pytest.mark.parametrize("strides", [(8, 1), (100, 1)], ids=["contiguous", "a row of a larger one"])
def test_what_a_series_allocates_is_laid_out_as_it_was(kernel, strides):
    """Whether or not it is made like another tensor."""
    describe, _ = describing(kernel)

    def call(left, right):
        outs = left.new_empty(1, 8), left.new_empty(3, 4), left.new_empty(3, 4)
        plan.run(describe, left, outs[0])
        plan.run(describe, outs[1], outs[2])
        return *outs, left.new_empty(1, 8), left.new_empty(1, 8, dtype=torch.float16)

    series = Series()
    for _ in range(3):
        given = [torch.empty(100).as_strided((1, 8), strides) for _ in range(2)]
        found = series.call(call, tuple(given))
    assert [tuple(tensor.shape) for tensor in found] == [(1, 8), (3, 4), (3, 4), (1, 8), (1, 8)]
    assert [tensor.stride() for tensor in found] == [(8, 1), (4, 1), (4, 1), (8, 1), (8, 1)]
    assert [tensor.dtype for tensor in found] == [torch.float32] * 4 + [torch.float16]
    assert len({tensor.untyped_storage().data_ptr() for tensor in (*found, *given)}) == 7


def test_a_series_lets_go_of_memory_when_it_is_used_for_the_last_time(kernel):
    alive: list[weakref.ref] = []

    def note(tensor):
        alive.append(weakref.ref(tensor))

    def count(tensor):
        counts.append(sum(reference() is not None for reference in alive))

    def call(left):
        for _ in range(3):
            part = left.new_empty(4)
            plan.apply(note, part)
            plan.apply(count, left)
            del part
        return left.new_empty(1)

    series, counts = Series(), []
    for _ in range(2):
        series.call(call, (torch.empty(4),))
        alive.clear()
    assert counts == [1, 1, 1, 0, 0, 0], "recorded, the call itself lets go; played, the step that used it"


@pytest.mark.parametrize(
    "unsound",
    [lambda left: left.mul_(2), lambda left: left.new_zeros(3), lambda left: plan.apply(torch.Tensor.zero_, left * 2)],
    ids=["an operation", "an allocation with an operation", "a result of one"],
)
def test_what_no_step_does_is_done_by_a_call_each_time(kernel, unsound):
    called = []

    def call(left):
        called.append(unsound(left))
        return left.new_empty(1)

    series = Series()
    for number in range(3):
        series.call(call, (torch.ones(4, 8),))
        assert len(called) == number + 1


def test_a_series_notices_another_alignment_and_another_function_is_not_of_it(kernel):
    describe, described = describing(kernel)

    def call(left, right):
        plan.run(describe, left, right)
        return left.new_empty(1)

    series = Series()
    for _ in range(3):
        series.call(call, (torch.empty(4, 8), torch.empty(4, 8)))
    assert len(described) == 1
    series.call(call, (torch.empty(33)[1:].view(4, 8), torch.empty(4, 8)))
    assert len(described) == 2
    plan.run(describe, torch.empty(3, 8), torch.empty(4, 8))  # outside of it
    assert len(described) == 3


def test_a_series_that_failed_is_none(kernel):
    describe, _ = describing(kernel)
    series, fails = Series(), True

    def failing(left, right):
        plan.run(describe, left, right)
        if fails:
            raise MemoryError
        return left.new_empty(1)

    for fails in (True, True, False):
        before = len(kernel.launched) + len(kernel.bound)
        with pytest.raises(MemoryError) if fails else contextlib.nullcontext():
            series.call(failing, (torch.empty(4, 8), torch.empty(4, 8)))
        assert len(kernel.launched) + len(kernel.bound) == before + 1


@pytest.mark.parametrize("rows", [slice(0, 4), slice(0, 3)], ids=["all of it", "a part of it"])
def test_a_product_returns_its_result_where_it_was_allocated_for_that(kernel, rows):
    """Not where it is written to a part of a tensor, or over another one's elements."""
    describe, _ = describing(kernel)
    written: list[torch.Tensor] = []

    def write(left, right, out):
        written.append(out)
        torch.mm(left, right, out=out)

    def call(left, right):
        first, second = left.new_empty(4, 8), left.new_empty(4, 8)
        plan.apply(write, left[rows], right, first[rows], returning=torch.mm)
        plan.run(describe, first, second)
        plan.apply(write, left[rows], right, first[rows], returning=torch.mm)
        return first, second

    series = Series()
    for number in range(3):
        given = torch.randn(4, 6), torch.randn(6, 8)
        written.clear()
        first, second = series.call(call, given)
        assert torch.equal(first[rows], torch.mm(given[0][rows], given[1]))
        assert len(written) == (2 if number == 0 or rows.stop == 3 else 1)
    (left, _, right) = kernel.launched[-1]
    assert (left, right) == (first.data_ptr(), second.data_ptr())


def test_a_series_is_done_on_the_device_of_its_tensors(monkeypatch):
    @contextlib.contextmanager
    def device(index):
        before, now[0] = now[0], index
        yield
        now[0] = before

    now, seen = [0], []
    monkeypatch.setattr(internals, "current_device", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    recorder = SimpleNamespace(device=torch.device("cuda", 1), alignments=[0], steps=[])
    source, place = series._Source([True, False], recorder), series._Place(0)
    source.add(series._Step(lambda _: seen.append(now[0]), (place,), [place], None, None))
    replay, tensor = source.function((place, None)), torch.empty(2)
    for now[0] in (0, 1):
        was = now[0]
        assert replay(tensor, None) == (tensor, None)
        assert now == [was]
    assert seen == [1, 1]
