"""What whole calls do, recorded once. Kernels are stand-ins: what matters is which arguments reach them."""

import contextlib
import weakref
from types import SimpleNamespace

import pytest
import torch
from replayed import describing

from swiglu_kernels.runtime import internals
from swiglu_kernels.runtime.shortcuts import plan, series
from swiglu_kernels.runtime.shortcuts.series import Series


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
