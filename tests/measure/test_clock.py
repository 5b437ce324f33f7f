import pytest
import torch

from swiglu_bench.measure import clock as clock_module
from swiglu_bench.measure.clock import CpuClock, CudaClock, LatencyClock, make_clock


def test_the_cpu_s_clock_is_the_wall_around_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    ticks = iter([10.0, 10.25])
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: events.append("reading") or next(ticks))
    clock = make_clock(torch.device("cpu"))
    sample = clock.sample(lambda: events.append("call") or "result", lead_us=1e9)
    assert events == ["reading", "call", "reading"]
    assert (sample.ms, sample.host_us, sample.result) == (250.0, 250_000.0, "result")
    assert sample.queue_filled, "nothing is queued on a CPU, so nothing can have a gap"
    assert clock.cache == "cpu"


def test_errors_come_through() -> None:
    with pytest.raises(ZeroDivisionError):
        CpuClock().sample(lambda: 1 / 0, 0.0)


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda", 0)


@pytest.mark.gpu
def test_the_clock_of_a_gpu_and_its_other_data(cuda: torch.device) -> None:
    """The other data is twice the cache and is read before each sample."""
    cold, hot = make_clock(cuda), make_clock(cuda, cold_l2=False)
    assert isinstance(cold, CudaClock)
    assert isinstance(hot, CudaClock)
    assert (cold.cache, hot.cache, hot._other_data) == ("cold", "hot", None)
    assert cold._other_data is not None
    assert cold._other_data.nbytes >= 2 * torch.cuda.get_device_properties(cuda).L2_cache_size
    cold._other_data[:7] = 1
    assert cold.sample(lambda: cold._sum.item(), 100.0).result == 7


@pytest.mark.gpu
def test_launch_gaps_of_the_host_do_not_count(cuda: torch.device) -> None:
    """Twenty launches of next to nothing: the host needs longer to queue them than the GPU to run them."""
    clock, value = CudaClock(cuda), torch.zeros(1, device=cuda)

    def call() -> None:
        for _ in range(20):
            value.add_(1)

    call()
    clock.synchronize()
    lead = clock.sample(call, 1000.0).host_us
    sample = clock.sample(call, 2 * lead)
    assert sample.queue_filled
    assert sample.ms > 0


@pytest.mark.gpu
def test_a_host_that_is_late_is_noticed(cuda: torch.device) -> None:
    """The call waits for the GPU, so the first event has passed before everything is queued."""
    clock, value = CudaClock(cuda), torch.zeros(1, device=cuda)
    assert not clock.sample(value.item, 10.0).queue_filled


@pytest.mark.gpu
def test_the_result_is_handed_out(cuda: torch.device) -> None:
    clock, value = CudaClock(cuda), torch.arange(8, device=cuda)
    for one in (clock, LatencyClock(clock)):
        assert one.sample(lambda: value + 1, 100.0).result.tolist() == list(range(1, 9))
