import multiprocessing
import pickle
from multiprocessing.connection import Connection

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef, shared_cache

from swiglu_bench.check.letterbox import ALIGNMENT_BYTES, Letterbox, Sizes

CPU = torch.device("cpu")
SIZES = {"output": (7, 5), "empty": (0, 4), "w_gate": (3, 2)}


def fill(address: bytes, dtype: torch.dtype) -> None:
    box = Letterbox.open(address, SIZES, dtype)
    for number, place in enumerate(box.tensors.values()):
        place.fill_(number + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_one_process_writes_another_reads(dtype: torch.dtype) -> None:
    box = Letterbox.make(SIZES, dtype, CPU)
    try:
        assert {name: tuple(place.shape) for name, place in box.tensors.items()} == SIZES
        assert not any(place.any() for place in box.tensors.values())
        child = multiprocessing.get_context("fork").Process(target=fill, args=(box.address(), dtype))
        child.start()
        child.join()
        assert child.exitcode == 0
        assert box.tensors["output"].eq(1).all()
        assert box.tensors["w_gate"].eq(3).all()
    finally:
        box.close()


def test_tensors_are_aligned_and_do_not_overlap() -> None:
    box = Letterbox.make(SIZES, torch.float16, CPU)
    places = sorted((value.data_ptr(), value.nbytes) for value in box.tensors.values())
    assert all((address - places[0][0]) % ALIGNMENT_BYTES == 0 for address, _ in places)
    assert places[-1][0] >= places[0][0] + 7 * 5 * 2
    box.close()


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


def test_what_is_open_of_an_earlier_letterbox_is_not_handed_out_again() -> None:
    shared_cache["handle", 512] = StorageWeakRef(torch.empty(0).untyped_storage())
    shared_cache["handle", 1024] = StorageWeakRef(torch.empty(0).untyped_storage())
    address = pickle.dumps((_open_as_pytorch, (None, "handle", 512)))
    opened = Letterbox.open(address, {"output": (2, 2)}, torch.float32)
    assert opened.tensors["output"].shape == (2, 2)
    assert ("handle", 1024) in shared_cache
    del shared_cache["handle", 1024]


def _open_as_pytorch(tensor_cls: object, storage_handle: str, storage_offset_bytes: int) -> torch.Tensor:
    assert (storage_handle, storage_offset_bytes) not in shared_cache
    return torch.zeros(ALIGNMENT_BYTES, dtype=torch.uint8)


def _hold(pipe: Connection, address: bytes, sizes: Sizes) -> None:
    box = Letterbox.open(address, sizes, torch.float32)
    pipe.send(box.tensors["output"].sum().item())
    pipe.recv()
