import pytest
import torch

from swiglu_bench.measure import clock as clock_module
from swiglu_bench.measure.clock import CpuClock, CudaClock, LatencyClock, make_clock


def test_the_cpu_s_clock_is_the_wall_around_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    ticks = iter([10.0, 10.25])
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: events.append("reading") or next(ticks))
    clock = make_clock(torch.device("cpu"))
    sample = clock.sample(
        lambda: events.append("call") or "result", 1e9, lambda: events.append("prepare"), lambda: events.append("hand")
    )
    assert events == ["prepare", "reading", "call", "reading", "hand"]
    assert (sample.ms, sample.host_us, sample.result) == (250.0, 250_000.0, "result")
    assert sample.queue_filled, "nothing is queued on a CPU, so nothing can have a gap"
    assert clock.cache == "cpu"


def test_a_pause_is_taken_out_of_its_own_sample_only(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([10.0, 10.1, 10.4, 10.5, 20.0, 20.1])
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: next(ticks))
    clock = CpuClock()

    def pausing() -> None:
        with clock.pause():
            pass

    assert clock.sample(pausing, 0.0).ms == pytest.approx(200.0)
    assert clock.sample(lambda: None, 0.0).ms == pytest.approx(100.0)


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda", 0)


@pytest.mark.gpu
def test_the_clock_of_a_gpu_and_its_other_data(cuda: torch.device) -> None:
    """The other data is twice the cache and is read before each sample, behind what is prepared."""
    cold, hot = make_clock(cuda), make_clock(cuda, cold_l2=False)
    assert isinstance(cold, CudaClock)
    assert isinstance(hot, CudaClock)
    assert (cold.cache, hot.cache, hot._other_data) == ("cold", "hot", None)
    other = cold._other_data
    assert other is not None
    assert other.nbytes >= 2 * torch.cuda.get_device_properties(cuda).L2_cache_size
    assert cold.sample(lambda: cold._sum.item(), 100.0, lambda: other[:7].fill_(1)).result == 7
    assert 200.0 < (cold.sample(lambda: None, 100.0).mhz or 0.0) < 4000.0


@pytest.mark.gpu
def test_launch_gaps_of_the_host_do_not_count_and_a_host_that_is_late_is_noticed(cuda: torch.device) -> None:
    """Twenty launches of next to nothing take the host longer than the GPU; `item` waits for the GPU."""
    clock, value = CudaClock(cuda), torch.zeros(1, device=cuda)

    def call() -> None:
        for _ in range(20):
            value.add_(1)

    call()
    clock.synchronize()
    lead = clock.sample(call, 1000.0).queue_us
    assert clock.sample(call, 2 * lead).queue_filled
    assert not clock.sample(value.item, 10.0).queue_filled


@pytest.mark.gpu
def test_what_is_paused_or_prepared_is_no_part_of_a_sample(cuda: torch.device) -> None:
    clock, spin = CudaClock(cuda), lambda: torch.cuda._sleep(20_000_000)

    def pausing() -> None:
        with clock.pause():
            spin()

    whole = clock.sample(spin, 100.0).ms
    assert clock.sample(pausing, 100.0).ms < whole / 2
    assert clock.sample(lambda: None, 100.0, prepare=spin).ms < whole / 2
    with pytest.raises(NotImplementedError):
        LatencyClock(clock).pause()


@pytest.mark.gpu
def test_the_result_is_handed_out_and_over(cuda: torch.device) -> None:
    clock, value, taken = CudaClock(cuda), torch.arange(8, device=cuda), []
    for kind in (clock, LatencyClock(clock)):
        sample = kind.sample(lambda: value + 1, 100.0, hand_over=lambda: taken.append(value + 2))
        assert sample.result.tolist() == list(range(1, 9))
        assert taken.pop().tolist() == list(range(2, 10))
