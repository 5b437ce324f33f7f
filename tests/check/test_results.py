import math
import multiprocessing
import pickle
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from specimens import small_case
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef, shared_cache

from swiglu_bench.cases.cases import Dtype
from swiglu_bench.check import results
from swiglu_bench.check.inputs import make_problem
from swiglu_bench.check.results import ALIGNMENT_BYTES, Letterbox, Sizes, fingerprint, form_fault, poison, same_bits

CPU = torch.device("cpu")


class Other(Tensor):
    pass


def without_memory() -> Tensor:
    value = torch.ones(2, 3)
    value.untyped_storage().resize_(0)
    return value


def nested(layout: torch.layout) -> Tensor:
    """Whose first use imports for a second."""
    return torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=layout)


ODD: list[tuple[Any, str, str, str]] = [
    (None, "missing", "no gradient came back", ""),
    ((torch.ones(2, 3), torch.ones(2, 3)), "plain tensor", "tuple", "torch.Tensor"),
    (np.ones((2, 3), np.float32), "plain tensor", "ndarray", "torch.Tensor"),
    (torch.ones(2, 3).as_subclass(Other), "plain tensor", "Other", "torch.Tensor"),
    (torch.nn.Parameter(torch.ones(2, 3)), "plain tensor", "Parameter", "torch.Tensor"),
    (torch.ones(2, 3).to_sparse(), "plain tensor", "sparse_coo", "dense"),
    (partial(nested, torch.strided), "plain tensor", "nested", "dense"),
    (partial(nested, torch.jagged), "plain tensor", "NestedTensor", "Tensor"),
    (torch.ones(2, 3, dtype=torch.complex64).conj(), "plain tensor", "lazy view", "values in memory"),
    (torch._neg_view(torch.ones(2, 3)), "plain tensor", "lazy view", "values in memory"),
    (without_memory(), "plain tensor", "memory", ""),
    (torch.ones(3, 2), "form", "(3, 2)", "(2, 3)"),
    (torch.ones(2, 3, dtype=torch.float64), "form", "float64", "float32"),
    (torch.ones(2, 3, device="meta"), "form", "meta", "cpu"),
]


@pytest.mark.parametrize(
    ("value", "check", "came", "wanted"), ODD, ids=[f"{check}: {came}" for _, check, came, _ in ODD]
)
def test_results_of_odd_kinds_say_what_came_and_what_is_wanted(value: Any, check: str, came: str, wanted: str) -> None:
    fault = form_fault(value() if isinstance(value, partial) else value, (2, 3), torch.float32, CPU)
    assert fault is not None
    assert fault.check == check
    assert came in fault.reason
    assert wanted in fault.reason
    assert "\n" not in fault.reason


def test_memory_of_an_input_is_no_memory_for_a_result() -> None:
    both = torch.ones(10, 4)
    beside, across = both[5:], both[3:8]
    assert form_fault(beside, (5, 4), torch.float32, CPU, [both[:5]]) is None
    fault = form_fault(across, (5, 4), torch.float32, CPU, [torch.ones(3), both[:5]])
    assert fault is not None
    assert fault.check == "aliasing"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4), (0, 4)])
def test_a_fingerprint_sees_one_bit_and_one_exchange(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.randn(shape).to(dtype)
    mark = fingerprint(value)
    assert torch.equal(mark, fingerprint(value.clone()))
    if value.numel() < 2:
        return
    changed, exchanged = value.clone(), value.clone()
    changed.view(-1)[-1].nextafter_(torch.tensor(9.0, dtype=dtype))
    flat = exchanged.view(-1)
    flat[0], flat[-1] = value.view(-1)[-1], value.view(-1)[0]
    for other in (changed, exchanged):
        assert not torch.equal(mark, fingerprint(other))
        assert not same_bits(value, other)
    nan = value * math.nan
    assert torch.equal(fingerprint(nan), fingerprint(nan.clone()))
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.zeros(1), -torch.zeros(1))


@pytest.mark.gpu
def test_memory_that_is_handed_out_next_is_poisoned() -> None:
    problem = make_problem(small_case(tokens=2000, dtype=Dtype.BFLOAT16), "cuda")
    torch.cuda.empty_cache()
    poison(problem, backward=False)
    assert torch.empty(2000, 40, dtype=torch.bfloat16, device="cuda").isnan().all()


# Letterboxes

SIZES = {"output": (7, 5), "empty": (0, 4), "w_gate": (3, 2)}


def test_no_file_stays_and_closing_twice_is_harmless() -> None:
    box = Letterbox.make(SIZES, torch.float32, CPU)
    file = box._file
    assert file is not None
    assert file.exists()
    reader = Letterbox.open(box.address(), SIZES, torch.float32)
    box.close()
    box.close()
    assert not file.exists()
    assert not reader.tensors["output"].any(), "who has it open can go on"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_process_that_made_it_opens_it(device: str) -> None:
    sizes = {"output": (3, 4)}
    made = Letterbox.here(sizes, torch.float32, torch.device(device))
    opened = Letterbox.open(made.address(), sizes, torch.float32)
    opened.tensors["output"].fill_(7.0)
    assert (made.tensors["output"] == 7.0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("killed", [True, False], ids=["killed", "alive"])
def test_closing_gives_the_memory_back(killed: bool) -> None:
    device, sizes = torch.device("cuda"), {"output": (1024, 1024)}
    before = torch.cuda.memory_allocated(device)
    box = Letterbox.make(sizes, torch.float32, device)
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_hold, args=(theirs, box.address(), sizes))
    process.start()
    assert mine.recv() == 0.0
    if killed:
        process.kill()
        process.join()
    box.close()
    if not killed:
        mine.send("let go")
        process.join()
    assert torch.cuda.memory_allocated(device) == before


@pytest.mark.gpu
def test_another_letterbox_may_take_the_place_of_one_that_is_still_open() -> None:
    device, small, large = torch.device("cuda"), {"output": (2048, 4096)}, {"output": (4096, 4096)}
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    kept = torch.empty(large["output"], dtype=torch.float32, device=device)
    place = kept.data_ptr()
    del kept  # memory that the allocator keeps, and gives to both
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_open_each, args=(theirs,))
    process.start()
    theirs.close()  # so that its end is told
    for sizes in (small, large, small):
        box = Letterbox.make(sizes, torch.float32, device)
        assert box.tensors["output"].data_ptr() == place
        box.tensors["output"].fill_(1.0)
        torch.cuda.synchronize(device)
        mine.send((box.address(), sizes))
        assert mine.recv() == box.tensors["output"].numel()
        box.close()
    mine.send(None)
    process.join()
    assert torch.cuda.memory_allocated(device) == before


def _open_each(pipe: Connection) -> None:
    boxes = []
    while told := pipe.recv():
        boxes.append(Letterbox.open(*told, torch.float32))
        pipe.send(boxes[-1].tensors["output"].sum().item())


def test_what_is_open_of_an_earlier_letterbox_is_not_handed_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "rebuild_cuda_tensor", _open_as_pytorch)
    shared_cache["handle", 512] = StorageWeakRef(torch.empty(0).untyped_storage())
    shared_cache["handle", 1024] = StorageWeakRef(torch.empty(0).untyped_storage())
    address = pickle.dumps({"storage_handle": "handle", "storage_offset_bytes": 512})
    opened = Letterbox.open(address, {"output": (2, 2)}, torch.float32)
    assert opened.tensors["output"].shape == (2, 2)
    assert ("handle", 1024) in shared_cache
    del shared_cache["handle", 1024]


def _open_as_pytorch(storage_handle: str, storage_offset_bytes: int, **kinds: object) -> torch.Tensor:
    assert (storage_handle, storage_offset_bytes) not in shared_cache
    return torch.zeros(ALIGNMENT_BYTES, dtype=torch.uint8)


def _hold(pipe: Connection, address: bytes, sizes: Sizes) -> None:
    box = Letterbox.open(address, sizes, torch.float32)
    pipe.send(box.tensors["output"].sum().item())
    pipe.recv()
