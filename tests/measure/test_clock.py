import pytest
import torch

from swiglu_bench.measure import clock as clock_module
from swiglu_bench.measure.clock import CpuClock, CudaClock, make_clock

CPU = torch.device("cpu")


def test_the_cpu_s_clock_is_the_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([10.0, 10.25])
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: next(ticks))
    sample = CpuClock().sample(lambda: "result", lead_us=1e9)
    assert (sample.ms, sample.host_us) == (250.0, 250_000.0)
    assert sample.result == "result"
    assert sample.queue_filled, "nothing is queued on a CPU, so nothing can have a gap"


def test_only_the_call_is_between_the_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: float(events.append("reading") or 0))
    CpuClock().sample(lambda: events.append("call"), 0.0)
    assert events == ["reading", "call", "reading"]


def test_it_calls_once_and_lets_errors_through() -> None:
    calls: list[int] = []
    CpuClock().sample(lambda: calls.append(1), 0.0)
    assert calls == [1]
    with pytest.raises(ZeroDivisionError):
        CpuClock().sample(lambda: 1 / 0, 0.0)


def test_waiting_for_a_cpu_is_nothing() -> None:
    CpuClock().synchronize()


@pytest.mark.parametrize("cold", [True, False])
def test_the_clock_of_a_cpu(cold: bool) -> None:
    clock = make_clock(CPU, cold)
    assert isinstance(clock, CpuClock)
    assert clock.cache == "cpu"


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda", 0)


@pytest.mark.gpu
@pytest.mark.parametrize(("cold", "name"), [(True, "cold"), (False, "hot")])
def test_the_clock_of_a_gpu(cuda: torch.device, cold: bool, name: str) -> None:
    clock = make_clock(cuda, cold)
    assert isinstance(clock, CudaClock)
    assert clock.cache == name


@pytest.mark.gpu
def test_the_other_data_is_twice_the_cache(cuda: torch.device) -> None:
    other = CudaClock(cuda)._other_data
    assert other is not None
    assert other.nbytes >= 2 * torch.cuda.get_device_properties(cuda).L2_cache_size
    assert CudaClock(cuda, cold_l2=False)._other_data is None


@pytest.mark.gpu
def test_the_other_data_is_read_before_each_sample(cuda: torch.device) -> None:
    clock = CudaClock(cuda)
    assert clock._other_data is not None
    clock._other_data[:7] = 1
    assert clock.sample(lambda: clock._sum.item(), 100.0).result == 7


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
    assert clock.sample(lambda: value + 1, 100.0).result.tolist() == list(range(1, 9))
