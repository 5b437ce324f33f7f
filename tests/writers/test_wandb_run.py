"""Against the real wandb: offline runs are read back from their files, and a local server stands for W&B's."""

import http.server
import json
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from places import SUPPORT

from swiglu_bench.measure.statistics import Verdict
from swiglu_bench.rows.record import COLUMNS, Record, Status
from swiglu_bench.writers import wandb_run
from swiglu_bench.writers.wandb_run import WandbRun, summarize

CONFIG = {"command": "swiglu-bench forward", "settings": {"tokens": [128, 8192]}, "machine": {"device": "NVIDIA H200"}}
LINE = "time_ms/glu/forward/qwen2.5-7b/bfloat16"


def make_record(**changes: Any) -> Record:
    values: dict[str, Any] = {
        "run_id": "run1", "command": "forward", "shape": "qwen2.5-7b", "hidden": 3584, "intermediate": 18944,
        "tokens": 128, "dtype": "bfloat16", "scope": "glu", "mode": "forward", "seed": 0, "implementation": "eager",
        "weight_layout": "separate", "gradients": "x w_gate w_up", "status": Status.OK,
    }  # fmt: skip
    return Record(**{**values, **changes})


RECORDS = (
    make_record(time_ms=1.5, ratio=1.0, tflops=300.0, limit_pct=50.0, flops=2**50 + 1, error_ratio=0.5),
    make_record(implementation="fused", time_ms=1.2, ratio=0.8, saved_bytes=3 * 2**20, error_ratio=0.25),
    make_record(implementation="fused", time_ms=60.0, ratio=0.6, tokens=8192),
    make_record(
        implementation="fused", tokens=1, status=Status.INCORRECT, reason="output: too far off", error_ratio=9.0
    ),
    make_record(implementation="liger", status=Status.SKIPPED, reason="It has no glu scope."),
)


@pytest.fixture(autouse=True)
def fresh_wandb(tmp_path, monkeypatch):
    """A user whom W&B has never seen, and a library that reads the environment anew."""
    wandb = pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("HOME", "USERPROFILE", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    (tmp_path / "home").mkdir()
    wandb.teardown()
    yield
    wandb.teardown()


def entries(folder: Path) -> Iterator[Any]:
    """Every entry of the run's file, which is a LevelDB log: blocks of 32 KiB that hold chunks with a 7-byte head."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, position, entry = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        entry += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # the whole of an entry, or its last chunk
            record = wandb_internal_pb2.Record()
            record.ParseFromString(entry)
            entry = b""
            yield record


def table_of(folder: Path, name: str) -> Any:
    """A table that was logged, from the file that would be uploaded."""
    (path,) = folder.glob(f"wandb/offline-run-*/files/media/table/{name}*.table.json")
    return json.loads(path.read_text())


def name(item: Any) -> str:
    return item.key or ".".join(item.nested_key)


class TestOffline:
    @pytest.fixture
    def run(self, tmp_path, monkeypatch) -> WandbRun:
        monkeypatch.setenv("WANDB_MODE", "offline")
        run = WandbRun("swiglu", CONFIG, "forward llama7b", ["h200"], "group", tmp_path, warn=pytest.fail)
        for record in RECORDS:
            run.write(record)
        run.close()
        run.close()
        pytest.importorskip("wandb").teardown()  # its process may still be writing
        return run

    def test_the_run_is_described(self, run, tmp_path):
        (about,) = (entry.run for entry in entries(tmp_path) if entry.HasField("run"))
        assert (about.project, about.display_name, list(about.tags)) == ("swiglu", "forward llama7b", ["h200"])
        assert about.run_group == "group"
        config = {name(item): json.loads(item.value_json) for item in about.config.update}
        assert {key: config[key] for key in CONFIG} == CONFIG

    def test_figures_are_drawn_over_tokens(self, run, tmp_path):
        metrics = [entry.metric for entry in entries(tmp_path) if entry.HasField("metric")]
        assert {(metric.glob_name, metric.step_metric) for metric in metrics if metric.glob_name} == {
            (f"{figure}/*", "tokens") for figure in wandb_run.FIGURES
        }
        assert all(metric.summary.none for metric in metrics), "the last of a curve is no figure to sort runs by"

    def test_every_ok_record_gives_its_figures_and_nothing_else_does(self, run, tmp_path):
        steps = [
            {name(item): json.loads(item.value_json) for item in entry.history.item if not name(item).startswith("_")}
            for entry in entries(tmp_path)
            if entry.HasField("history")
        ]
        case = LINE.removeprefix("time_ms/")
        assert steps[:3] == [
            {
                "tokens": 128,
                f"time_ms/{case}/eager": 1.5,
                f"ratio/{case}/eager": 1.0,
                f"tflops/{case}/eager": 300.0,
                f"limit_pct/{case}/eager": 50.0,
                f"error_ratio/{case}/eager": 0.5,
            },
            {
                "tokens": 128,
                f"time_ms/{case}/fused": 1.2,
                f"ratio/{case}/fused": 0.8,
                f"error_ratio/{case}/fused": 0.25,
                f"saved_mib/{case}/fused": 3.0,
            },
            {"tokens": 8192, f"time_ms/{case}/fused": 60.0, f"ratio/{case}/fused": 0.6},
        ]
        assert len(steps) == 4
        assert {key for key in steps[3] if "/" not in key and key.endswith("._type")} == {
            "records._type", "standing._type", "not_ok._type"
        }  # fmt: skip

    def test_the_table_has_every_row_and_column(self, run, tmp_path):
        table = table_of(tmp_path, "records")
        assert tuple(table["columns"]) == COLUMNS
        assert table["data"] == [
            [str(value) if isinstance(value, Status) else value for value in record.row().values()]
            for record in RECORDS
        ]

    def test_who_stands_where_is_a_table(self, run, tmp_path):
        table = table_of(tmp_path, "standing")
        assert table["data"] == [
            ["eager", 0, 1.0, 1.0, 0.5, 1, 0, 0, 0],
            ["fused", 2, 0.7, 0.6, 9.0, 2, 0, 1, 0],
            ["liger", 0, None, None, None, 0, 1, 0, 0],
        ]

    def test_what_is_not_ok_says_why(self, run, tmp_path):
        case = LINE.removeprefix("time_ms/")
        assert table_of(tmp_path, "not_ok")["data"] == [
            ["fused", case, 1, "incorrect", "output: too far off"],
            ["liger", case, 128, "skipped", "It has no glu scope."],
        ]

    def test_charts_are_drawn(self, run, tmp_path):
        case = LINE.removeprefix("time_ms/")
        config = {
            name(item): json.loads(item.value_json)
            for entry in entries(tmp_path)
            if entry.HasField("config") or entry.HasField("run")
            for item in (*entry.config.update, *entry.run.config.update)
        }
        shown = {key.removeprefix("_wandb.visualize."): value for key, value in config.items() if "visualize" in key}
        figures = {key.split("/")[1] for key in shown}
        assert figures == {"time_ms", "ratio", "limit_pct"}, "no memory was measured"
        assert shown[f"charts/time_ms/{case}"]["panel_config"]["panelDefId"] == "wandb/lineseries/v0"
        assert shown[f"bars/time_ms/{case}"]["panel_config"]["panelDefId"] == "wandb/bar/v0"
        assert table_of(tmp_path, f"bars/time_ms/{case}")["data"] == [["fused", 60.0]]
        line = table_of(tmp_path, f"charts/time_ms/{case}")
        assert sorted(line["data"]) == [[128, "eager", 1.5], [128, "fused", 1.2], [8192, "fused", 60.0]]

    def test_what_was_run_can_be_filtered_by(self, run, tmp_path):
        config = {
            name(item): json.loads(item.value_json)
            for entry in entries(tmp_path)
            if entry.HasField("config")
            for item in entry.config.update
        }
        assert config["implementations"] == ["eager", "fused", "liger"]
        assert config["tokens"] == [128, 8192, 1]

    def test_the_summary_has_the_figures_per_implementation(self, run, tmp_path):
        updates = [item for entry in entries(tmp_path) for item in entry.summary.update]
        summary = {name(item): json.loads(item.value_json) for item in updates}
        expected = summarize(RECORDS)
        assert {key: summary[key] for key in expected} == expected

    def test_it_says_where_the_run_is_and_how_to_upload_it(self, run, tmp_path):
        (folder,) = tmp_path.glob("wandb/offline-run-*")
        assert run.url_or_path == f"{folder} (to upload it: wandb sync {folder})"

    def test_nothing_is_printed(self, capfd, run):
        assert capfd.readouterr() == ("", "")


def test_a_run_may_be_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    WandbRun("swiglu", CONFIG, "name", folder=tmp_path, warn=pytest.fail, entity="team", run_id="mine-1").close()
    pytest.importorskip("wandb").teardown()
    (about,) = (entry.run for entry in entries(tmp_path) if entry.HasField("run"))
    assert (about.run_id, about.entity) == ("mine-1", "team")


def test_an_id_that_cannot_be_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    told: list[str] = []
    run = WandbRun("swiglu", CONFIG, "name", folder=tmp_path, warn=told.append, run_id="a/b")
    run.close()
    assert run.failed
    assert "Run ID" in told[0]


def test_texts_may_be_enumerations(tmp_path, monkeypatch):
    """A sweep's verdicts are; wandb refuses a column of two types."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = WandbRun("swiglu", CONFIG, "name", folder=tmp_path, warn=pytest.fail)
    for verdict in ("", Verdict.FASTER):
        run.write(make_record(verdict=verdict))
    run.close()
    pytest.importorskip("wandb").teardown()
    table = table_of(tmp_path, "records")
    assert [row[table["columns"].index("verdict")] for row in table["data"]] == ["", "faster"]


def test_without_records_there_is_no_table(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    WandbRun("swiglu", CONFIG, "name", folder=tmp_path, warn=pytest.fail).close()
    pytest.importorskip("wandb").teardown()
    assert not [entry for entry in entries(tmp_path) if entry.HasField("history")]


def test_disabled_by_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    run = WandbRun("swiglu", CONFIG, "name", folder=tmp_path, warn=pytest.fail)
    run.write(RECORDS[0])
    run.close()
    assert run.url_or_path == ""


def test_system_figures_are_off(tmp_path, monkeypatch):
    """W&B would poll the GPU while it is being timed."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = WandbRun("swiglu", CONFIG, "name", folder=tmp_path, warn=pytest.fail)
    assert run._run.settings.x_disable_stats
    run.close()


class TestNoLogin:
    CODE = (
        "import sys, pathlib; from test_wandb_run import *\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "run = WandbRun('swiglu', CONFIG, 'name', folder=folder, warn=lambda text: print('TOLD', text))\n"
        "run.write(RECORDS[0]); run.close(); print('WENT ON', repr(run.url_or_path), sys.stdin.isatty())"
    )
    TOLD = (
        "TOLD The run is not logged to W&B: No API key configured. Use `wandb login` to log in. "
        "Log in with `wandb login`, or set WANDB_MODE=offline to keep the run on disk."
    )

    def command(self, folder: Path) -> dict[str, Any]:
        paths = os.pathsep.join([str(Path(__file__).parent), str(SUPPORT), *filter(None, sys.path)])
        return {"args": [sys.executable, "-c", self.CODE, str(folder)], "env": {**os.environ, "PYTHONPATH": paths}}

    def test_in_a_script(self, tmp_path):
        done = subprocess.run(
            **self.command(tmp_path), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines() == [self.TOLD, "WENT ON '' False"]

    def test_on_a_terminal_nothing_is_asked(self, tmp_path):
        pty = pytest.importorskip("pty")
        ours, theirs = pty.openpty()
        process = subprocess.Popen(**self.command(tmp_path), stdin=theirs, stdout=theirs, stderr=theirs)
        assert process.wait(timeout=60) == 0
        os.close(theirs)
        text = os.read(ours, 65536).decode()
        os.close(ours)
        assert text.splitlines() == [self.TOLD, "WENT ON '' True"]


def test_a_broken_library_is_told(tmp_path, monkeypatch):
    told: list[str] = []
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = WandbRun("swiglu", CONFIG, "name", folder=tmp_path, warn=told.append)
    run.write(RECORDS[0])
    run.close()
    (line,) = told
    assert line.startswith("The run is not logged to W&B: import of wandb halted")


class TestOnline:
    @pytest.fixture
    def server(self, monkeypatch):
        """The few answers that start a run; `closed` is the outage."""

        class Answers(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])) or "{}")
                run = body.get("variables", {}).get("name")
                bucket = {"id": "1", "name": run, "displayName": run, "config": "{}", "historyLineCount": 0}
                bucket["project"] = {"id": "1", "name": "swiglu", "entity": {"id": "1", "name": "someone"}}
                started = body.get("operationName") == "UpsertBucket"
                data = {"upsertBucket": {"bucket": bucket, "inserted": True}} if started else {}
                answer = json.dumps({"data": data}).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        yield server
        server.shutdown()
        server.server_close()

    def test_an_outage_during_the_run_is_told_once_and_does_not_hang(self, server, tmp_path, monkeypatch, capfd):
        wandb = pytest.importorskip("wandb")
        if "finish_timeout" not in wandb.Settings.model_fields:
            pytest.skip("this wandb waits for the network without limit")
        monkeypatch.setattr(wandb_run, "FINISH_TIMEOUT_S", 1)
        monkeypatch.setattr(wandb_run, "charts", lambda records: {})
        monkeypatch.setattr(
            wandb_run, "tables", lambda records: {"rows": len(records)}
        )  # a table asks the server, and wandb fixes how long: 20 s
        told: list[str] = []
        run = WandbRun("swiglu", CONFIG, "name", folder=tmp_path, warn=told.append)
        assert run.url_or_path.startswith(f"http://127.0.0.1:{server.server_port}/someone/swiglu/runs/")
        server.shutdown()
        server.server_close()
        for record in RECORDS:
            run.write(record)
        run.close()
        (folder,) = tmp_path.glob("wandb/run-*")
        assert told == [
            f"W&B has failed, the run goes on: Timed out finishing run. To upload it later: wandb sync {folder}"
        ]
        assert capfd.readouterr() == ("", "")

    def test_every_failure_after_the_first_is_silent(self, tmp_path, monkeypatch):
        monkeypatch.setenv("WANDB_MODE", "offline")
        told: list[str] = []
        run = WandbRun("swiglu", CONFIG, "name", folder=tmp_path, warn=told.append)

        def fail(*_: Any) -> None:
            raise ConnectionResetError("Connection lost\nand more")

        monkeypatch.setattr(run._run, "log", fail)
        for record in RECORDS:
            run.write(record)
        run.close()
        (line,) = told
        assert line.startswith("W&B has failed, the run goes on: Connection lost. To upload it later: wandb sync ")

    def test_without_a_network_at_the_start_the_run_is_kept_on_disk(self, server, tmp_path, monkeypatch, capfd):
        server.shutdown()
        server.server_close()
        monkeypatch.setattr(wandb_run, "START_TIMEOUT_S", 1)
        told: list[str] = []
        began = time.monotonic()
        run = WandbRun("swiglu", CONFIG, "name", folder=tmp_path, warn=told.append)
        assert time.monotonic() - began < 20
        run.write(RECORDS[0])
        run.close()
        (line,) = told
        (folder,) = tmp_path.glob("wandb/offline-run-*")
        assert line.startswith("W&B cannot be reached, the run is kept on disk: ")
        assert "imed out" in line
        assert line.endswith(f". To upload it later: wandb sync {folder}")
        assert "\n" not in line
        assert run.url_or_path == f"{folder} (to upload it: wandb sync {folder})"
        assert list(folder.glob("run-*.wandb"))
        assert capfd.readouterr() == ("", "")


def test_summary():
    assert summarize(RECORDS) == {
        "best_ratio/eager": 1.0, "median_ratio/eager": 1.0, "worst_error_ratio/eager": 0.5,
        "rows_ok/eager": 1, "rows_skipped/eager": 0, "rows_incorrect/eager": 0, "rows_error/eager": 0,
        "best_ratio/fused": 0.6, "median_ratio/fused": 0.7, "worst_error_ratio/fused": 9.0,
        "rows_ok/fused": 2, "rows_skipped/fused": 0, "rows_incorrect/fused": 1, "rows_error/fused": 0,
        "fastest_at/eager": 0, "fastest_at/fused": 2, "best_implementation": "fused", "best_median_ratio": 0.7,
        "failures": 1, "rows_ok/liger": 0, "rows_skipped/liger": 1, "rows_incorrect/liger": 0, "rows_error/liger": 0,
    }  # fmt: skip


def test_an_error_that_is_no_number_is_the_worst():
    worst = summarize([make_record(error_ratio=float("nan"), status=Status.INCORRECT), make_record(error_ratio=9.0)])
    assert worst["worst_error_ratio/eager"] != worst["worst_error_ratio/eager"]
