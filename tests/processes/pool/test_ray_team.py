"""A real cluster of this host with two CPUs: deaths of a member and of the driver, and what is refused."""

import contextlib
import csv
import dataclasses
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpus import a_gpu
from specimens import small_case

from swiglu_bench.implementations import pytorch
from swiglu_bench.machine import machine
from swiglu_bench.processes.pool import ray_team
from swiglu_bench.processes.pool.place import Place
from swiglu_bench.processes.pool.ray_team import RayTeam, reason_of
from swiglu_bench.processes.pool.team import Done, Lost
from swiglu_bench.session.settings import Settings, Task
from swiglu_bench.spec.errors import BadInput

ray = pytest.importorskip("ray", reason="needs Ray: pip install swiglu-bench[cluster]")

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_RECORD_ACTOR_TASK_LOGGING": "0", "NO_COLOR": "1", "COLUMNS": "200",
}  # fmt: skip
TOKENS = (3, 5, 7, 9, 11, 13, 15)
ARGUMENTS = ("--shapes", "24x40", "--tokens", ",".join(map(str, TOKENS)), "--impl", "eager,eager-packed")
EVERY_ROW = [(tokens, name) for tokens in TOKENS for name in ("eager", "eager-packed")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Its address. The folder is a short path: Unix sockets lie in it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    head = subprocess.Popen(
        [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}", "--num-cpus=2",
            "--num-gpus=0", "--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={folder}",
            "--object-store-memory=80000000", "--node-ip-address=127.0.0.1",
        ],
        env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and head.poll() is None:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            time.sleep(0.1)
        assert head.poll() is None, "ray start ended"
        yield f"127.0.0.1:{port}"
    finally:
        head.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(head.pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def _environment() -> dict[str, str]:
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    return os.environ | QUIET | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "SWIGLU_BENCH_TEST": str(os.getpid())}


def _start(address: str, folder: Path, *more: str) -> subprocess.Popen[str]:
    """A sweep as a user starts it."""
    command = [
        sys.executable, "-m", "swiglu_bench.cli.app", "forward", *ARGUMENTS, "--budget", "0.5", "--ray", address,
        "--out", str(folder), *more,
    ]  # fmt: skip
    return subprocess.Popen(command, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _rows(folder: Path) -> list[dict[str, str]]:
    file = folder / "records.csv"
    return list(csv.DictReader(file.open(encoding="utf-8"))) if file.exists() else []


def _finished(folder: Path) -> set[int]:
    """Token counts of which every implementation has its row."""
    rows = {(int(row["tokens"]), row["implementation"]) for row in _rows(folder)}
    return {count for count in TOKENS if all(row in rows for row in EVERY_ROW if row[0] == count)}


def _members(title: bytes) -> list[int]:
    """Process numbers of this test's own actors, by what Ray calls a process that does something."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            mark = f"SWIGLU_BENCH_TEST={os.getpid()}".encode()
            if entry.read_bytes().startswith(title) and mark in (entry.parent / "environ").read_bytes():
                found.append(int(entry.parent.name))
    return found


def _wait_for(condition: Any, timeout_s: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    pytest.fail("it did not come in time")


def test_a_killed_member_and_a_killed_driver_lose_no_row_and_double_none(cluster: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = _start(cluster, folder)
    member = _wait_for(lambda: _members(b"ray::Member.run_case"))[0]
    os.kill(member, signal.SIGKILL)
    lines, retried = [], ""
    for line in first.stdout or ():
        lines.append(line)
        if lost := re.search(r"^Warning: .+ CPU was lost: .+; .+ (\d+) tokens .+ is run once more\.$", line):
            retried = lost[1]
        if retried:
            break
    _wait_for(lambda: _finished(folder))
    first.kill()
    first.communicate(timeout=60)
    finished = _finished(folder)
    assert retried, "".join(lines)
    assert len(finished) < len(TOKENS), "the driver was killed in the middle"
    again = _start(cluster, folder, "--resume")
    text, _ = again.communicate(timeout=120)
    assert again.returncode == 0, text
    rows = _rows(folder)
    assert sorted((int(row["tokens"]), row["implementation"]) for row in rows) == EVERY_ROW
    assert {(row["status"], row["host"]) for row in rows} == {("ok", machine.describe(torch.device("cpu")).host)}
    runs = {count: {row["run_id"] for row in rows if row["tokens"] == str(count)} for count in TOKENS}
    before = {run for count in finished for run in runs[count]}
    after = {run for count in TOKENS if count not in finished for run in runs[count]}
    assert len(before) == len(after) == 1, runs
    assert before != after
    _wait_for(lambda: not _members(b"ray::Member"))


@pytest.fixture
def team(cluster: str) -> Iterator[RayTeam]:
    """Connected from here."""
    found = RayTeam(cluster, None, 60.0, pytest.fail)
    yield found
    found.close()


def test_what_a_member_says_of_itself_is_checked(team: RayTeam) -> None:
    this = machine.describe(torch.device("cpu"))
    assert team.device == torch.device("cpu")
    team._first = Place(7, this)
    mine = {"version": ray_team.__version__, "code": ray_team.sources.code(), "machine": this.as_dict(), "pid": 1}
    for change, sentence in (
        ({"version": "0.0.1"}, r"has 0\.0\.1 and this host .*; install the same everywhere\."),
        ({"code": {}}, r"has other code of "),
        ({"machine": this.as_dict() | {"device": "NVIDIA B200"}}, r"not alike: device is .* and NVIDIA B200;"),
    ):
        with pytest.raises(BadInput, match=sentence):
            team._greet(0, mine | change)
    with pytest.raises(BadInput, match=r"swiglu-bench is not installed on a host of the cluster; install "):
        team._greet(0, RuntimeError("ModuleNotFoundError: No module named 'swiglu_bench'"))
    with pytest.raises(BadInput, match=r"could not start: OSError: no space\."):
        team._greet(0, RuntimeError("stack\n\nOSError: no space"))
    with pytest.raises(BadInput, match="already connected to a cluster"):
        RayTeam(team.address, None, 60.0, pytest.fail)


def test_a_cluster_without_gpus_has_none(cluster: str) -> None:
    with pytest.raises(BadInput, match=r"--device: cuda was asked for, but the cluster has no GPU; give cpu\."):
        RayTeam(cluster, "cuda", 60.0, pytest.fail)
    assert not ray.is_initialized()


def test_nobody_answers() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(BadInput, match=rf"^--ray: nobody answers at 127\.0\.0\.1:{port} \(.*refused\); `ray status`"):
        RayTeam(f"127.0.0.1:{port}", None, 60.0, pytest.fail)
    assert time.monotonic() - began < 2 * ray_team.CONNECT_S


def test_who_answers_is_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_team, "ANSWER_S", 3.0)
    with socket.socket() as silent:
        silent.bind(("0.0.0.0", 0))
        silent.listen(5)
        port = silent.getsockname()[1]
        with pytest.raises(BadInput, match=rf"^--ray: no cluster answers at 127\.0\.0\.1:{port} within 3 s; start one"):
            RayTeam(f"127.0.0.1:{port}", None, 60.0, pytest.fail)


def test_there_is_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_team, "TRIAL", "import sys; sys.exit('ConnectionError: Could not find any Ray instance.')")
    with pytest.raises(BadInput) as refused:
        RayTeam("auto", None, 60.0, pytest.fail)
    assert str(refused.value) == (
        "--ray: no cluster is to be had at auto: ConnectionError: Could not find any Ray instance; "
        "start one with `ray start`, and sweep on one of its hosts."
    )


@pytest.mark.parametrize("address", ["", "host", "host:port", ":6379", "ray://host:10001"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(BadInput, match=r"is no address; give auto or HOST:PORT"):
        RayTeam(address, None, 60.0, pytest.fail)


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput) as refused:
        RayTeam("auto", None, 60.0, pytest.fail)
    assert str(refused.value) == "--ray needs Ray, which is not installed; install swiglu-bench[cluster]."


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("The actor died.\n\tpid: 3\n Worker exit type: X Worker exit detail: It was killed.", "It was killed"),
        ("Traceback\n  File\nOSError: no space.", "OSError: no space"),
        ("", "RuntimeError"),
    ],
)
def test_reasons_in_a_part_of_a_sentence(text: str, reason: str) -> None:
    assert reason_of(RuntimeError(text)) == reason


def test_a_place_on_another_host_has_its_name() -> None:
    this = dataclasses.replace(machine.describe(torch.device("cpu")), host="far", device_type="cuda", gpu_index=3)
    assert Place(9, this).name == "far GPU 3"


# Without a cluster


class FakeRay:
    """As many GPUs as `gpus`; every actor answers what `answers` says, at once, and never where that is None."""

    def __init__(self, gpus: int = 2) -> None:
        self.gpus = gpus
        self.free = gpus
        self.answers: dict[tuple[int, str], Any] = {}
        self.killed: list[int] = []
        self.hired = 0
        self.initialized = True

    def cluster_resources(self) -> dict[str, float]:
        return {"GPU": float(self.gpus)}

    def available_resources(self) -> dict[str, float]:
        return {"GPU": float(self.free)}

    def remote(self, **needs: Any) -> Any:
        assert (needs["num_gpus"], needs["num_cpus"], needs["max_restarts"]) == (1, 0, 0)
        return lambda member: types.SimpleNamespace(remote=self._hire)

    def _hire(self, device: str, environment: dict[str, str]) -> Any:
        assert (device, environment) == ("cuda:0", {})
        number, self.hired = self.hired, self.hired + 1

        def method(name: str) -> Any:
            return types.SimpleNamespace(remote=lambda *_: (number, name, object()))

        return types.SimpleNamespace(
            number=number, **{name: method(name) for name in ("hello", "start", "run_case", "close")}
        )

    def wait(self, asked: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        ready = [one for one in asked if self._answer(one) is not None]
        return ready[:num_returns], []

    def _answer(self, reference: Any) -> Any:
        number, name, _ = reference
        usual = {"hello": said(number), "start": "", "run_case": [], "close": 0}
        return self.answers.get((number, name), usual[name])

    def get(self, reference: Any) -> Any:
        answer = self._answer(reference)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self, handle: Any) -> None:
        self.killed.append(handle.number)

    def is_initialized(self) -> bool:
        return self.initialized

    def shutdown(self) -> None:
        self.initialized = False


def said(number: int, **changes: Any) -> dict[str, Any]:
    """What an actor on a GPU of its own says of itself."""
    this = a_gpu(number, host=f"host{number // 2}", **changes).as_dict()
    return {"version": ray_team.__version__, "code": ray_team.sources.code(), "machine": this, "pid": number}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(ray_team, "_connected", lambda address: fake)
    monkeypatch.setattr(ray_team, "LOOK_S", 0.0)
    return fake


def a_team(told: list[str] | None = None) -> RayTeam:
    return RayTeam("auto", None, 60.0, pytest.fail if told is None else told.append)


def begin(team: RayTeam, wait: bool = True) -> None:
    team.assemble()
    team.start([pytorch.eager], Settings(Task.TIME, team.device, "c", "r"), Path("logs"), "c", wait)


def test_an_actor_for_each_gpu_and_for_those_that_come_later(fake: FakeRay) -> None:
    team = a_team()
    begin(team)
    assert (team.device, team.joining, team.places) == (torch.device("cuda", 0), True, {})
    team.wait(0.0)
    assert [place.name for place in team.places.values()] == ["host0 GPU 0", "host0 GPU 1"]
    assert not team.joining
    fake.gpus = 4
    for _ in range(3):
        team.wait(0.0)
    assert [place.name for place in team.places.values()][2:] == ["host1 GPU 2", "host1 GPU 3"]
    team.close()
    assert sorted(fake.killed) == [0, 1, 2, 3]
    team.close()


def test_a_sweep_begins_with_the_gpus_that_are_free(fake: FakeRay) -> None:
    fake.free = 1
    fake.answers[1, "hello"] = None
    fake.wait = lambda asked, num_returns, timeout: ([one for one in asked if one[0] == 0][:num_returns], [])  # type: ignore[method-assign]
    team = a_team()
    assert team.assemble().gpu_index == 0


def test_no_gpu_is_free(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_team, "JOIN_S", 0.1)
    fake.wait = lambda asked, num_returns, timeout: ([], [])  # type: ignore[method-assign]
    with pytest.raises(BadInput, match=r"^--ray: none of the cluster's 2 GPUs came free in 0 s; `ray status`"):
        a_team().assemble()
    assert not fake.initialized


def test_two_models_are_refused_at_the_start_and_left_out_later(fake: FakeRay) -> None:
    fake.answers[1, "hello"] = said(1, device="NVIDIA H100")
    with pytest.raises(BadInput, match=r"GPU 0 and host0 GPU 1 are not alike: device is NVIDIA H200 and NVIDIA H100"):
        a_team().assemble()
    told: list[str] = []
    fake.gpus = fake.free = 1
    fake.hired = 0
    team = a_team(told)
    begin(team)
    fake.gpus = 2
    for _ in range(3):
        team.wait(0.0)
    assert list(team.places) == [0]
    assert [text[:22] for text in told] == ["A place is left out. h"]


def test_a_gpu_in_use_on_a_host_is_refused_where_nobody_waits(fake: FakeRay) -> None:
    fake.answers[1, "start"] = "The GPU is in use by process 3: another; wait for it to end, or leave out --no-wait."
    with pytest.raises(BadInput, match=r"^host0 GPU 1: The GPU is in use by process 3"):
        begin(a_team(), wait=False)


def test_a_lost_actor_is_replaced_a_few_times(fake: FakeRay) -> None:
    team = a_team()
    begin(team)
    team.wait(0.0)
    team.begin(1, small_case())
    fake.answers[1, "run_case"] = RuntimeError("Worker exit detail: It was killed.")
    assert team.wait(0.0) == [Lost(1, "It was killed")]
    assert list(team.places) == [0]
    assert team.joining
    for _ in range(2):
        team.wait(0.0)
    assert list(team.places) == [0, 2]
    team.begin(2, small_case())
    assert team.wait(0.0) == [Done(2, [])]


def test_an_actor_that_joins_while_others_get_ready_gets_ready_too(fake: FakeRay) -> None:
    fake.free = 1
    usual, seen = fake.wait, list[str]()

    def slow(asked: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        """The second actor speaks only once the first was told to start."""
        seen.extend(name for _, name, _ in asked)
        return usual([one for one in asked if one[0] == 0 or "start" in seen], num_returns, timeout)

    fake.wait = slow  # type: ignore[method-assign]
    team = a_team()
    begin(team, wait=False)
    assert list(team.places) == [0, 1]


def test_a_device_of_one_host_is_none_of_a_cluster() -> None:
    with pytest.raises(BadInput, match=r"^--device: with --ray 'cuda:1' names nothing; give cpu or cuda\.$"):
        RayTeam("auto", "cuda:1", 60.0, pytest.fail)
