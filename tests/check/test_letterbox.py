import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch

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


def _hold(pipe: Connection, address: bytes, sizes: Sizes) -> None:
    box = Letterbox.open(address, sizes, torch.float32)
    pipe.send(box.tensors["output"].sum().item())
    pipe.recv()
