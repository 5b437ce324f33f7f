import pytest
import torch

from swiglu_bench.measure.graph import WARMUPS, capture

CUDA = torch.device("cuda", 0)

pytestmark = pytest.mark.gpu


def test_a_replay_does_the_work_again_on_what_is_there_now() -> None:
    x, calls = torch.ones(1024, device=CUDA), []

    def call() -> torch.Tensor:
        calls.append(1)
        return x * 2

    graph = capture(call, CUDA)
    assert len(calls) == WARMUPS + 1
    x.fill_(3)
    graph.replay()
    torch.cuda.synchronize()
    assert graph.result.unique().tolist() == [6.0]
    assert len(calls) == WARMUPS + 1


def test_what_cannot_be_recorded_says_so_and_the_device_goes_on() -> None:
    x = torch.ones(4, device=CUDA)
    with pytest.raises(RuntimeError):
        capture(lambda: x.sum().item(), CUDA)
    torch.cuda.synchronize()
    assert capture(lambda: x + 1, CUDA).result.shape == (4,)
