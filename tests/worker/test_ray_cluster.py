"""A real cluster of this host with two CPUs: deaths of a member and of the driver, and what is refused."""

import contextlib
import csv
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.machine import machine
from swiglu_bench.worker import ray_cluster
from swiglu_bench.worker.places import Place
from swiglu_bench.worker.ray_cluster import RayCluster

ray = pytest.importorskip("ray", reason="needs Ray: pip install ray")

pytestmark = pytest.mark.timed

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_RECORD_ACTOR_TASK_LOGGING": "0", "NO_COLOR": "1", "COLUMNS": "200",
}  # fmt: skip
TOKENS = tuple(range(3, 11, 2))
ARGUMENTS = (
    "--shapes", "24x40", "--tokens", ",".join(map(str, TOKENS)), "--scope", "glu", "--dtype", "fp32",
    "--impl", "eager,eager-packed",
)  # fmt: skip
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
    """A sweep as a user starts it; `verify`, which needs the fewest processes."""
    command = [
        sys.executable, "-m", "swiglu_bench", "verify", *ARGUMENTS, "--ray", address,
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
    assert again.returncode in (0, 1), text
    rows = _rows(folder)
    assert sorted((int(row["tokens"]), row["implementation"]) for row in rows) == EVERY_ROW
    assert {row["host"] for row in rows} == {machine.describe(torch.device("cpu")).host}
    assert {row["status"] for row in rows} <= {"ok", "unsettled"}, "on a busy machine the wall clock settles nothing"
    runs = {count: {row["run_id"] for row in rows if row["tokens"] == str(count)} for count in TOKENS}
    before = {run for count in finished for run in runs[count]}
    after = {run for count in TOKENS if count not in finished for run in runs[count]}
    assert len(before) == len(after) == 1, runs
    assert before != after
    _wait_for(lambda: not _members(b"ray::Member"))


@pytest.fixture
def team(cluster: str) -> Iterator[RayCluster]:
    """Connected from here."""
    found = RayCluster(cluster, None, pytest.fail)
    yield found
    found.close()


def test_what_a_member_says_of_itself_is_checked(team: RayCluster) -> None:
    this = machine.describe(torch.device("cpu"))
    assert team.device == torch.device("cpu")
    team._first = Place(7, this)
    mine = {"version": ray_cluster.__version__, "code": ray_cluster.sources.code(), "machine": this.as_dict(), "pid": 1}
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
        RayCluster(team.address, None, pytest.fail)


def test_a_cluster_without_gpus_has_none(cluster: str) -> None:
    with pytest.raises(BadInput, match=r"--device: cuda was asked for, but the cluster has no GPU; give cpu\."):
        RayCluster(cluster, "cuda", pytest.fail)
    assert not ray.is_initialized()


def test_nobody_answers() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(BadInput, match=rf"^--ray: nobody answers at 127\.0\.0\.1:{port} \(.*refused\); `ray status`"):
        RayCluster(f"127.0.0.1:{port}", None, pytest.fail)
    assert time.monotonic() - began < 2 * ray_cluster.CONNECT_S


def test_what_is_no_address() -> None:
    for address in ("", "host", "host:port", ":6379", "ray://host:10001"):
        with pytest.raises(BadInput, match=r"is no address; give auto or HOST:PORT"):
            RayCluster(address, None, pytest.fail)
