"""Two places that are CPUs of this host, with real child processes."""

import contextlib
import dataclasses
import io
import multiprocessing
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from gpus import a_gpu
from places import SUPPORT
from rich.console import Console
from specimens import small_case

from swiglu_bench.cases.cases import Mode
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.contenders import pytorch
from swiglu_bench.loop import sweep
from swiglu_bench.machine import locks, machine
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.options import TimingOptions
from swiglu_bench.request import INTERRUPTED, Request
from swiglu_bench.rows.finished_run import load_run
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.show import Writer
from swiglu_bench.tasks.sweep import task_of
from swiglu_bench.worker import places
from swiglu_bench.worker.child import DoesNotEnd
from swiglu_bench.worker.court import declare
from swiglu_bench.worker.places import Lost, Place, SeveralGpus, Work, check_alike, gpus, visible
from swiglu_bench.worker.policy import Settings, Task

pytestmark = pytest.mark.timed

CPU = torch.device("cpu")
THIS = machine.describe(CPU)
BOTH = [pytorch.eager, pytorch.eager_packed]
RULE = Rule(warmup_rounds=1, min_rounds=4, max_rounds=4, min_s=0.0, budget_s=60.0)
SETTINGS = Settings(Task.TIME, CPU, "swiglu-bench forward", "r", rule=RULE)
VERIFY = dataclasses.replace(SETTINGS, task=Task.VERIFY)
"""No more processes than are needed, where time is no matter."""
CASES = [small_case(mode=Mode.FORWARD, tokens=tokens) for tokens in (3, 5, 7)]


def two_places(count: int = 2) -> SeveralGpus:
    found = [Place(number, THIS, {"WHICH_PLACE": f"place {number}"}) for number in range(count)]
    return SeveralGpus(found, pytest.fail)


def start(team: SeveralGpus, logs: Path, settings: Settings = SETTINGS, wait: bool = True) -> None:
    team.start(Work(task_of(settings), BOTH, settings, 60.0, logs, wait), lambda: None)


def run(
    team: SeveralGpus, folder: Path, implementations: Sequence[Implementation] = BOTH, resume: bool = False,
    also: Sequence[Writer] = (),
) -> tuple[int, str]:  # fmt: skip
    text = io.StringIO()
    console = Console(file=text, width=120, color_system=None)
    request = Request("forward", TimingOptions(out=folder, resume=resume), VERIFY, CASES, implementations, team)
    status = sweep(request, task_of(VERIFY), team.assemble(), console, also)
    return status, text.getvalue()


def test_every_row_once_whatever_the_number_of_places_and_so_with_resume(tmp_path: Path) -> None:
    class Interrupts:
        """As Ctrl-C after the first finished case."""

        def write(self, record: Record) -> None:
            if record.implementation == "eager-packed":
                raise KeyboardInterrupt

        def close(self) -> None:
            pass

    status, text = run(two_places(), tmp_path / "run", also=[Interrupts()])
    assert status == INTERRUPTED, text
    assert "Interrupted: 2 rows were kept." in text
    assert multiprocessing.active_children() == []
    status, text = run(two_places(3), tmp_path / "run", resume=True)
    assert status == 0, text
    assert "1 of 3 cases are finished" in text
    rows = load_run(tmp_path / "run").records
    assert sorted((row.tokens, row.implementation) for row in rows) == [
        (case.tokens, one.name) for case in CASES for one in BOTH
    ]
    assert {row.host for row in rows} == {THIS.host}
    assert multiprocessing.active_children() == []
    assert not (tmp_path / "run" / "logs").exists(), "nothing was printed"


def test_a_place_has_an_environment_of_its_own_and_a_folder_for_logs(tmp_path: Path) -> None:
    own = Path(shutil.copy(SUPPORT / "user_implementations.py", tmp_path / "mine.py"))
    own.write_text(own.read_text() + "\nimport os\nprint(os.environ.get('WHICH_PLACE'))\n")
    mine = declare(f"{own}:mine", 60.0)
    status, text = run(two_places(), tmp_path / "run", [pytorch.eager, mine])
    assert status == 0, text
    logs = sorted((tmp_path / "run" / "logs").glob("*/mine.log"))
    assert [log.read_text().split() for log in logs] == [["place", "0"], ["place", "1"]]


class FakeCourt:
    """Ends as it was told to."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def run(self, task: object, case: object, *_: object) -> list[Record]:
        raise DoesNotEnd("Process 7 was killed and does not end.") if case is CASES[0] else AssertionError("a bug")

    def end(self) -> None:
        raise DoesNotEnd("Process 7 was killed and does not end.")


def test_a_process_that_outlives_its_kill_costs_the_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(places, "Court", FakeCourt)
    team = two_places()
    start(team, tmp_path)
    team.begin(1, CASES[0])
    assert team.wait(10.0) == [Lost(1, "Process 7 was killed and does not end")]
    assert list(team.places) == [0]
    team.begin(0, CASES[1])
    with pytest.raises(AssertionError, match="a bug"):  # of the suite's own
        team.wait(10.0)
    with pytest.raises(DoesNotEnd):
        team.close()
    team.close()


def test_a_stop_ends_a_case_in_the_middle(tmp_path: Path) -> None:
    slow = Settings(Task.TIME, CPU, "c", "r", rule=Rule(min_rounds=10**6, max_rounds=10**6, budget_s=600.0))
    team = two_places()
    start(team, tmp_path, slow)
    team.begin(0, CASES[0])
    while not team.doing[0][0].startswith("timing"):
        assert team.wait(0.1) == []
    began = time.monotonic()
    team.close()
    assert time.monotonic() - began < 30
    assert multiprocessing.active_children() == []


def test_each_gpu_is_held_by_its_name_and_in_one_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    held: list[str] = []

    @contextlib.contextmanager
    def lock(uuid: str, command: str, wait: bool, tell: object) -> Iterator[None]:
        assert (command, wait) == ("c", False)
        held.append(uuid)
        yield
        held.remove(uuid)

    monkeypatch.setattr(locks, "gpu", lock)
    team = SeveralGpus([Place(number, a_gpu(number)) for number in (2, 0, 1)], pytest.fail)
    assert team.device == torch.device("cuda", 0)
    start(team, tmp_path, Settings(Task.TIME, team.device, "c", "r"), wait=False)
    assert held == ["GPU-0", "GPU-1", "GPU-2"]
    team.close()
    assert held == []


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_share_the_cases(tmp_path: Path) -> None:
    team = SeveralGpus(gpus("0,1"), print)
    how = Settings(Task.TIME, team.device, "swiglu-bench forward", "r", rule=Rule(budget_s=1.0))
    request = Request("forward", TimingOptions(out=tmp_path / "run"), how, CASES, BOTH, team)
    assert sweep(request, task_of(how), team.assemble(), Console(file=io.StringIO())) == 0
    rows = load_run(tmp_path / "run").records
    assert {row.status for row in rows} == {Status.OK}
    assert {row.gpu_uuid for row in rows} == {place.machine.gpu_uuid for place in gpus("0,1")}
    assert all(row.sm_mhz for row in rows)


# Which GPUs are meant


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with four GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(places.machine, "describe", lambda device: a_gpu(device.index))


@pytest.mark.usefixtures("four")
def test_gpus_by_index() -> None:
    for text, numbers in (("all", [0, 1, 2, 3]), ("2", [2]), (" 3, 0", [3, 0])):
        found = gpus(text)
        assert [place.number for place in found] == numbers
        environments = [{"CUDA_VISIBLE_DEVICES": f"GPU-{number}"} for number in numbers]
        assert [place.environment for place in found] == environments
    for text in ("4", "0,0", "cuda:0", "", "-1"):
        with pytest.raises(BadInput, match=r"^--gpus: .*\.$"):
            gpus(text)


def test_a_list_of_visible_gpus_is_respected() -> None:
    assert visible(1, "GPU-aa", {}) == "GPU-aa"
    for listed, seen in (("", "GPU-aa"), ("5,7", "7"), ("GPU-11, GPU-22", "GPU-22")):
        assert visible(1, "GPU-aa", {"CUDA_VISIBLE_DEVICES": listed}) == seen


@pytest.mark.parametrize("change", ["driver", "tuned_tiles"])
def test_everything_that_a_fingerprint_speaks_for_has_to_be_alike(change: str) -> None:
    one, other = Place(0, a_gpu(0)), Place(1, a_gpu(1, **{change: "another"}))
    with pytest.raises(BadInput, match=f"not alike: {change} is"):
        check_alike(one, other)
    check_alike(one, Place(1, a_gpu(1, host="b", power_limit_w=600.0)))
