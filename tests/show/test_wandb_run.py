"""Against the real wandb, without a network."""

import math
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from places import SUPPORT
from specimens import a_bare_record, a_record

from swiglu_bench.measure.statistics import Verdict
from swiglu_bench.rows.record import COLUMNS, Status
from swiglu_bench.show import wandb_run
from swiglu_bench.show.wandb_run import WandbRun, summarize

wandb = pytest.importorskip("wandb")

CONFIG = {"command": "swiglu-bench forward", "settings": {"tokens": [128, 8192]}, "machine": {"device": "NVIDIA H200"}}
ABOUT = {"project": "swiglu", "name": "name"}
CASE = "glu/forward/small/float32"
EAGER = {"time_ms": 1.5, "ratio": 1.0, "tflops": 300.0, "limit_pct": 50.0, "error_ratio": 0.5}
RECORDS = (
    a_bare_record(implementation="eager", tokens=128, flops=2**50 + 1, **EAGER),
    a_bare_record(
        implementation="fused", tokens=128, time_ms=1.2, ratio=0.8, saved_bytes=3 * 2**20, error_ratio=0.25,
        verdict=Verdict.FASTER,  # an enumeration in a column of texts, which wandb refuses
    ),
    a_bare_record(implementation="fused", time_ms=60.0, ratio=0.6, tokens=8192, remarks="Not checked."),
    a_bare_record(implementation="fused", tokens=1, status=Status.INCORRECT, reason="too far off", error_ratio=9.0),
    a_bare_record(implementation="liger", tokens=128, status=Status.SKIPPED, reason="It has no glu scope."),
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def new_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A user whom W&B has never seen."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        for name in ("HOME", "USERPROFILE", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
            patch.setenv(name, str(home))
        patch.setenv("NETRC", str(home / "netrc"))
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        patch.setenv("WANDB_MODE", "offline")
        wandb.teardown()
        yield
        wandb.teardown()


def test_an_offline_run_is_described_summed_up_and_has_the_figures_of_ok_records(tmp_path: Path) -> None:
    """The real wandb takes them all: what it refuses is told, which fails here."""
    about = {"project": "swiglu", "name": "forward llama7b", "tags": ["h200"], "group": "group"}
    run = WandbRun(CONFIG, tmp_path, pytest.fail, **about)
    own = run._run
    assert own.settings.x_disable_stats, "W&B would poll the GPU while it is being timed"
    if "finish_timeout" in wandb.Settings.model_fields:  # older ones wait for the network without limit
        assert (own.settings.finish_timeout, own.settings.finish_timeout_raises) == (wandb_run.FINISH_TIMEOUT_S, True)
    own.log, finish, summary = MagicMock(wraps=own.log), own.finish, {}
    expected = summarize(RECORDS)
    own.finish = lambda: (summary.update({key: own.summary[key] for key in expected}), finish())
    for record in RECORDS:
        run.write(record)
    run.close()
    run.close()
    wandb.teardown()  # its process may still be writing
    assert (own.project, own.name, own.group, own.tags) == ("swiglu", "forward llama7b", "group", ("h200",))
    assert {key: own.config[key] for key in CONFIG} == CONFIG
    assert (own.config["implementations"], own.config["tokens"]) == (["eager", "fused", "liger"], [128, 8192, 1])
    assert summary == expected
    (place,) = tmp_path.glob("wandb/offline-run-*")
    assert (run.url_or_path, run.upload) == (str(place), f"wandb sync {place}")
    assert run.place == f"{place} (to upload it: wandb sync {place})"

    *steps, last = (call.args[0] for call in own.log.call_args_list)
    fused = {"time_ms": 1.2, "ratio": 0.8, "error_ratio": 0.25, "saved_mib": 3.0}
    figures = [(128, "eager", EAGER), (128, "fused", fused), (8192, "fused", {"time_ms": 60.0, "ratio": 0.6})]
    assert steps == [
        {"tokens": tokens, **{f"{figure}/{CASE}/{name}": value for figure, value in of.items()}}
        for tokens, name, of in figures
    ]
    assert tuple(last["records"].columns) == COLUMNS
    assert last["records"].data == [list(record.row().values()) for record in RECORDS]
    assert last["standing"].columns[-3:] == ["incorrect", "error", "unsettled"]
    assert last["standing"].data == [
        ["eager", 0, 1.0, 1.0, 0.5, 1, 0, 0, 0, 0],
        ["fused", 2, 0.7, 0.6, 9.0, 2, 0, 1, 0, 0],
        ["liger", 0, None, None, None, 0, 1, 0, 0, 0],
    ]
    wrong = ["fused", CASE, 1, "incorrect", "too far off"]
    assert last["not_ok"].data == [wrong, ["liger", CASE, 128, "skipped", "It has no glu scope."]]
    assert last["remarks"].data == [["fused", CASE, 8192, "ok", "Not checked."]]


@pytest.mark.parametrize("broken", ["no library", "no such id", "the connection", "nothing, it is disabled"])
def test_what_goes_wrong_is_one_line_and_never_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    told: list[str] = []
    if broken == "no library":
        monkeypatch.setitem(sys.modules, "wandb", None)
    if broken != "no such id":
        monkeypatch.setenv("WANDB_MODE", "disabled")
    wandb.teardown()
    run_id = "a/b" if broken == "no such id" else None
    run = WandbRun(CONFIG, tmp_path, told.append, run_id, **ABOUT)
    if broken == "the connection":
        failing = MagicMock(side_effect=ConnectionResetError("Connection lost\nand more"))
        monkeypatch.setattr(run._run, "log", failing)
    for record in RECORDS:
        run.write(record)
    run.close()
    words = {"no library": "ModuleNotFoundError", "no such id": "Run ID", "the connection": "Connection lost and more."}
    assert (len(told), run.failed) == ((1, True) if broken in words else (0, False))
    assert words.get(broken, "") in "".join(told)
    wandb.teardown()


def test_without_a_key_a_terminal_is_asked_nothing_and_the_run_goes_on(tmp_path: Path) -> None:
    pty = pytest.importorskip("pty")
    code = (
        "import sys, pathlib; from test_wandb_run import *\n"
        "folder, tell = pathlib.Path(sys.argv[1]), lambda text: print('TOLD', text)\n"
        "run = WandbRun(CONFIG, folder, tell, **ABOUT)\n"
        "run.write(RECORDS[0]); run.close(); print('WENT ON', repr(run.url_or_path), sys.stdin.isatty())"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), str(SUPPORT), *filter(None, sys.path)])
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_MODE"} | {"PYTHONPATH": paths}
    ours, theirs = pty.openpty()
    arguments = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.Popen(arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    assert process.wait(timeout=60) == 0
    os.close(theirs)
    text = os.read(ours, 65536).decode()
    os.close(ours)
    told, went_on = text.splitlines()
    assert "No API key configured" in told
    assert went_on == "WENT ON '' True"


def test_without_a_network_at_the_start_the_run_is_kept_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(wandb_run, "START_TIMEOUT_S", 1)
    wandb.teardown()
    told: list[str] = []
    run = WandbRun(CONFIG, tmp_path, told.append, **ABOUT)
    run.write(RECORDS[0])
    run.close()
    wandb.teardown()
    (line,) = told
    (folder,) = tmp_path.glob("wandb/offline-run-*")
    assert "imed out" in line
    assert line.endswith(f": wandb sync {folder}")
    assert "\n" not in line
    assert list(folder.glob("run-*.wandb"))
    assert capfd.readouterr() == ("", "")


def test_summary() -> None:
    records = [
        a_record(implementation="eager", ratio=1.0, error_ratio=0.5),
        a_record(implementation="fused", ratio=0.8, error_ratio=0.25),
        a_record(implementation="fused", ratio=0.6, tokens=8192, error_ratio=None),
        a_bare_record(implementation="fused", tokens=1, status=Status.INCORRECT, error_ratio=9.0),
        a_bare_record(implementation="liger", status=Status.SKIPPED),
    ]
    assert summarize(records) == {
        "best_ratio/eager": 1.0, "median_ratio/eager": 1.0, "worst_error_ratio/eager": 0.5,
        "rows_ok/eager": 1, "rows_skipped/eager": 0, "rows_incorrect/eager": 0, "rows_error/eager": 0,
        "rows_unsettled/eager": 0,
        "best_ratio/fused": 0.6, "median_ratio/fused": 0.7, "worst_error_ratio/fused": 9.0,
        "rows_ok/fused": 2, "rows_skipped/fused": 0, "rows_incorrect/fused": 1, "rows_error/fused": 0,
        "rows_unsettled/fused": 0,
        "fastest_at/eager": 0, "fastest_at/fused": 2, "best_implementation": "fused", "best_median_ratio": 0.7,
        "failures": 1, "rows_ok/liger": 0, "rows_skipped/liger": 1, "rows_incorrect/liger": 0, "rows_error/liger": 0,
        "rows_unsettled/liger": 0,
    }  # fmt: skip


def test_an_error_that_is_no_number_is_the_worst() -> None:
    worst = summarize([a_record(error_ratio=math.nan, status=Status.INCORRECT), a_record(error_ratio=9.0)])
    assert math.isnan(float(worst["worst_error_ratio/mine"]))
