"""A cache folder that cannot be read or written, or is full, costs a warning and ends no command or operation."""

import os
import resource
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command_line import swiglu_bench

from swiglu_bench.machine import locks
from swiglu_bench.worker import environments
from swiglu_kernels import reference, swiglu_glu
from swiglu_kernels.runtime import kept
from swiglu_kernels.tiles import tuning

REAL_ROOT = environments.root
FEW = ("--shapes", "24x40", "--tokens", "3", "--impl", "eager", "--device", "cpu")
COMMANDS = {
    "memory": (*FEW, "--no-csv"), "list": ("--device", "cpu", "--format", "json"), "tune": ("--show",),
    "ceilings": ("--dtype", "fp32", "--device", "cpu", "--refresh"),
}  # fmt: skip


@pytest.fixture(params=["a file", "no permission", "full"])
def cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's cache folder of which nothing can be had."""
    folder, mounted = tmp_path / "cache", False
    if request.param == "a file":
        folder.write_text("no folder", encoding="utf-8")
    elif request.param == "full":
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", folder]
        mounted = sys.platform == "linux" and subprocess.run(command, capture_output=True).returncode == 0
        if not mounted:
            pytest.skip("only root may make a small file system")
        (folder / "all of it").write_bytes(bytes(4096))
    elif os.geteuid():
        folder.mkdir(mode=0)
    else:  # nothing is forbidden to root, except this where it is root of a container only
        folder = Path("/proc/1/root")
    if request.param == "no permission" and os.access(folder, os.X_OK):
        pytest.skip("this user may enter every folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.delenv(tuning.VARIABLE, raising=False)
    monkeypatch.setattr("platformdirs.user_cache_path", lambda *_, **__: folder / "swiglu-bench")
    monkeypatch.setattr(environments, "root", REAL_ROOT)
    tuning.forget()
    environments._writable.cache_clear()
    yield folder
    tuning.forget()
    if mounted:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command(command: str, cache: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        ran = swiglu_bench(command, *COMMANDS[command])
    assert ran.code == 0, ran.err + ran.out
    told = [line for line in ran.err.splitlines() if str(cache) in line]
    assert len(told) == len(set(told)), "once each"
    assert all(line.startswith("Warning: ") for line in told), ran.err
    if command == "memory":
        assert any("contenders cannot be written" in line for line in told), ran.err
    if command == "ceilings":
        assert "Kept for a day" not in ran.out
        assert any("measures the machine's limits anew" in line for line in told), ran.err


def test_an_operation(cache: Path) -> None:
    x, w_gate, w_up = torch.randn(3, 16), torch.randn(32, 16), torch.randn(32, 16)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        out = [swiglu_glu(x, w_gate, w_up) for _ in range(3)][-1]
    torch.testing.assert_close(out, reference.swiglu_glu(x, w_gate, w_up))
    assert len([warning for warning in told if str(cache) in str(warning.message)]) <= 1


@pytest.fixture
def _full() -> Iterator[None]:
    """A disk, to this process, on which no file has room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("_full")
def test_a_full_disk_sends_contenders_elsewhere(tmp_path: Path) -> None:
    environments._writable.cache_clear()
    with pytest.warns(UserWarning, match="contenders cannot be written: File too large; .* is used"):
        assert tmp_path not in environments._writable(tmp_path / "contenders").parents
    environments._writable.cache_clear()


def test_triton_s_own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that cannot write is called again with another folder, which later calls find in place."""
    knobs = pytest.importorskip("triton").knobs
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "file" / "below"))
    (tmp_path / "file").touch()

    def compiles() -> str:
        os.makedirs(knobs.cache.dir, exist_ok=True)
        return knobs.cache.dir

    with pytest.warns(UserWarning, match="below: cannot be used: Not a directory; each process compiles") as told:
        found = [kept.compiling(compiles) for _ in range(2)]
    assert found[0] == found[1] != str(tmp_path / "file" / "below")
    assert len(told) == 1

    def fails() -> None:
        raise FileNotFoundError("no compiler")

    with pytest.raises(FileNotFoundError):
        kept.compiling(fails)


def test_the_lock_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(locks.tempfile, "gettempdir", lambda: str(tmp_path / "file"))
    told: list[str] = []
    with locks.gpu("GPU-1", "a command", True, told.append):
        pass
    assert "another sweep on this GPU will not be noticed" in told[0]
