import pytest
import torch
from gpus import CPU, a_gpu

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.worker.pool import place
from swiglu_bench.worker.pool.place import Place, check_alike, gpus, visible


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with four GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(place.machine, "describe", lambda device: a_gpu(device.index))


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize(("text", "numbers"), [("all", [0, 1, 2, 3]), ("2", [2]), (" 3, 0", [3, 0])])
def test_gpus_by_index(text: str, numbers: list[int]) -> None:
    found = gpus(text)
    assert [one.number for one in found] == numbers
    assert [one.environment for one in found] == [{"CUDA_VISIBLE_DEVICES": f"GPU-{number}"} for number in numbers]
    assert found[0].name == f"a GPU {numbers[0]}"


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize("text", ["4", "0,0", "cuda:0", "", "-1"])
def test_what_are_no_gpus_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match=r"^--gpus: .*\.$"):
        gpus(text)


def test_without_a_gpu_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(BadInput, match=r"^--gpus: this machine has no usable CUDA GPU; leave it out\.$"):
        gpus("all")


@pytest.mark.parametrize(
    ("listed", "index", "seen"),
    [
        (None, 1, "GPU-aa"),
        ("", 1, "GPU-aa"),
        ("5,7", 1, "7"),
        ("GPU-11, GPU-22", 1, "GPU-22"),
        ("MIG-1,MIG-2", 0, "MIG-1"),
    ],
)
def test_a_list_of_visible_gpus_is_respected(listed: str | None, index: int, seen: str) -> None:
    environment = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert visible(index, "GPU-aa", environment) == seen


@pytest.mark.usefixtures("four")
def test_gpus_of_two_models_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    models = {0: "NVIDIA H200", 1: "NVIDIA H100"}
    monkeypatch.setattr(place.machine, "describe", lambda device: a_gpu(device.index, device=models[device.index]))
    with pytest.raises(BadInput, match=r"a GPU 0 and a GPU 1 .* NVIDIA H200 and NVIDIA H100"):
        gpus("0,1")


@pytest.mark.parametrize("change", ["driver", "torch", "cpu", "tuned_tiles"])
def test_everything_that_a_fingerprint_speaks_for_has_to_be_alike(change: str) -> None:
    one, other = Place(0, a_gpu(0)), Place(1, a_gpu(1, **{change: "another"}))
    with pytest.raises(BadInput, match=f"not alike: {change} is"):
        check_alike(one, other)
    check_alike(one, Place(1, a_gpu(1, host="b", power_limit_w=600.0)))


def test_a_seat_is_the_gpu_whichever_process_has_it() -> None:
    assert Place(0, a_gpu(0)).seat == Place(7, a_gpu(0)).seat != Place(0, a_gpu(1)).seat
    assert Place(0, CPU).seat != Place(1, CPU).seat
