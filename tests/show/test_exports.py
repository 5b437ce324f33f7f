"""`show --export` and `show --schema`, read back as their readers do: by their own code where it is installed.

Where it is not, by schemas written here from what they publish: github-action-benchmark's `BenchmarkResult` (of its
tool customSmallerIsBetter, which takes a list of them), pytest-benchmark's description of `--benchmark-json`, and
flashinfer-bench's Trace.
"""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from command_line import swiglu_bench
from places import ROOT
from reported import IN_A_CHECKOUT, write
from specimens import a_record, without_time

from swiglu_bench.rows.record import LAYOUTS, Status, TensorCheck

TEXT, NUMBER = {"type": "string", "minLength": 1}, {"type": "number"}
POSITIVE = {"type": "number", "exclusiveMinimum": 0}


def an_object(required: dict[str, Any], optional: dict[str, Any] | None = None, closed: bool = True) -> dict[str, Any]:
    properties = required | (optional or {})
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": not closed}


GITHUB = {
    "type": "array", "minItems": 1,
    "items": an_object({"name": TEXT, "unit": TEXT, "value": NUMBER}, {"range": TEXT, "extra": TEXT}),
}  # fmt: skip
STATS = dict.fromkeys(
    ("min", "max", "mean", "median", "q1", "q3", "ld15iqr", "hd15iqr", "ops", "total"), POSITIVE
) | dict.fromkeys(("stddev", "iqr", "rounds", "iterations", "iqr_outliers", "stddev_outliers"), NUMBER)
PYTEST = an_object({
    "machine_info": {"type": "object"}, "commit_info": {"type": "object"}, "datetime": TEXT, "version": TEXT,
    "benchmarks": {"type": "array", "minItems": 1, "items": an_object({
        "group": TEXT, "name": TEXT, "fullname": TEXT, "params": {}, "param": {}, "extra_info": {"type": "object"},
        "options": {"type": "object"},
        "stats": an_object(STATS | {"outliers": TEXT, "data": {"type": "array", "items": POSITIVE}}),
    })},
})  # fmt: skip
SIZE = {"type": "integer", "minimum": 0}
OR_NAN = {"anyOf": [NUMBER | {"minimum": 0}, {"const": "NaN"}]}
EVALUATION = an_object(
    {
        "status": {"enum": ["PASSED", "INCORRECT_NUMERICAL", "RUNTIME_ERROR"]}, "timestamp": TEXT, "log": {},
        "environment": an_object({"hardware": TEXT, "libs": {"additionalProperties": {"type": "string"}}}),
    },
    {
        "correctness": an_object({"max_relative_error": OR_NAN, "max_absolute_error": OR_NAN, "extra": {}}),
        "performance": an_object({"latency_ms": POSITIVE}, {"reference_latency_ms": NUMBER, "speedup_factor": NUMBER}),
    },
)  # fmt: skip
TRACE = an_object({
    "definition": TEXT, "solution": TEXT, "evaluation": EVALUATION,
    "workload": an_object({"axes": {"additionalProperties": SIZE}, "inputs": {"type": "object"}, "uuid": TEXT}),
})  # fmt: skip
SAMPLES = tuple(1 + 0.01 * (number % 7) for number in range(20))
RUNS = ("forward", "experts", "memory-mlp", "tp/llama7b", "train-llama")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The baseline, one that is faster, one that is wrong, one that died, and two of which nothing is known."""
    check = TensorCheck("output", True, 0.003, 0.003, 0.01, 0.05, 0.05, 0.2)
    eager = a_record(
        implementation="eager", time_ms=1.0, ratio=1.0, ratio_low=1.0, ratio_high=1.0, verdict="", samples_ms=SAMPLES
    )
    fast = a_record(implementation="fast", time_ms=0.8, ratio=0.8, ratio_low=0.79, ratio_high=0.81, samples_ms=SAMPLES)
    fast.tensor_checks = (check,)
    others = [
        without_time(status, "It broke.", implementation=status.value)
        for status in (Status.INCORRECT, Status.ERROR, Status.SKIPPED, Status.UNSETTLED)
    ]
    machine = {"host": "here", "device": "A GPU", "cpu": "A CPU", "python": "3.12"}
    for record in (eager, fast, *others):
        record.timestamp, record.device = "2026-01-01T00:00:00Z", "A GPU"
    return write(tmp_path_factory.mktemp("runs") / "run", eager, fast, *others, machine=machine, version="1")


def exported(run: Path, form: str, *options: str) -> str:
    return swiglu_bench("show", run, "--export", form, *options).out


def test_github_action_benchmark(run: Path) -> None:
    found = json.loads(exported(run, "github-action-benchmark"))
    jsonschema.validate(found, GITHUB)
    times, ratios = ([each for each in found if each["unit"] == unit] for unit in ("ms", "of eager's time"))
    assert [each["value"] for each in times] == [1.0, 0.8]
    assert [(each["value"], each["range"]) for each in ratios] == [(0.8, "0.79 to 0.81")]
    assert len({each["name"] for each in found}) == len(found)


def test_pytest_benchmark(run: Path) -> None:
    found = json.loads(exported(run, "pytest-benchmark"))
    jsonschema.validate(found, PYTEST)
    assert [bench["name"].rpartition("/")[2] for bench in found["benchmarks"]] == ["eager", "fast"]
    stats = found["benchmarks"][0]["stats"]
    assert (stats["min"], stats["rounds"]) == (0.001, 20)
    assert stats["ops"] * stats["mean"] == pytest.approx(1)


def test_pytest_benchmark_itself_reads_it(run: Path, tmp_path: Path) -> None:
    storage = pytest.importorskip("pytest_benchmark.storage.file", reason="pytest-benchmark is not installed")
    consumer, file = pytest.importorskip("pytest_benchmark.stats").Stats(), tmp_path / "found.json"
    exported(run, "pytest-benchmark", "--output", str(file))
    stats = json.loads(file.read_text(encoding="utf-8"))["benchmarks"][0]["stats"]
    consumer.data = stats["data"]
    theirs = consumer.as_dict()
    for name in ("min", "max", "mean", "stddev", "rounds", "median", "total", "ops"):
        assert stats[name] == pytest.approx(theirs[name]), name
    read = list(storage.FileStorage(tmp_path, logger=None).load_benchmarks(str(file)))
    assert [bench["rounds"] for bench in read] == [20, 20]


def test_flashinfer_trace(run: Path) -> None:
    found = list(map(json.loads, exported(run, "flashinfer-trace").splitlines()))
    for trace in found:
        jsonschema.validate(trace, TRACE)
    by_name = {trace["solution"]: trace["evaluation"] for trace in found}
    assert [evaluation["status"] for evaluation in by_name.values()] == [
        "PASSED", "PASSED", "INCORRECT_NUMERICAL", "RUNTIME_ERROR",
    ]  # fmt: skip
    assert by_name["fast"]["correctness"]["max_relative_error"] == 0.05
    assert by_name["fast"]["performance"] == {"latency_ms": 0.8, "reference_latency_ms": 1.0, "speedup_factor": 1.25}
    assert len({trace["workload"]["uuid"] for trace in found}) == 1


def test_flashinfer_bench_itself_reads_it(run: Path, tmp_path: Path) -> None:
    data = pytest.importorskip("flashinfer_bench.data", reason="flashinfer-bench is not installed")
    exported(run, "flashinfer-trace", "--output", str(tmp_path / "traces.jsonl"))
    traces = data.load_jsonl_file(data.Trace, tmp_path / "traces.jsonl")
    assert [trace.is_successful() for trace in traces] == [True, True, False, False]


@IN_A_CHECKOUT
@pytest.mark.parametrize("name", RUNS)
def test_the_schema_is_that_of_the_rows(name: str) -> None:
    run = ROOT / "results/nvidia-h200" / name
    schema, document = (json.loads(swiglu_bench("show", run, *how).out) for how in (["--schema"], ["--format", "json"]))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(document, schema)
    assert schema["$id"].startswith(f"urn:swiglu-bench:{document['kind']}:")
    for column, wrong in (("status", "fine"), ("time_ms", -5), ("tokens", "many"), ("ratio", 0), ("tokes", 1)):
        if column in document["rows"][0] or column == "tokes":
            row = document["rows"][0] | {column: wrong}
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(document | {"rows": [row]}, schema)


def test_the_schema_needs_no_run() -> None:
    schema = json.loads(swiglu_bench("show", "--schema").out)
    assert schema["$defs"]["row"]["required"] == list(LAYOUTS["run"].header())


def test_what_cannot_be_exported(run: Path, tmp_path: Path) -> None:
    bare = write(tmp_path / "bare", a_record())
    for words, *arguments in (
        ("is not one of github-action-benchmark, pytest-benchmark", run, "--export", "junit"),
        ("exclude each other", run, "--export", "flashinfer-trace", "--format", "json"),
        ("exclude each other", run, "--schema", "--pivot", "time_ms"),
        ("Missing argument RUN", "--export", "flashinfer-trace"),
        ("no samples are beside the rows", bare, "--export", "pytest-benchmark"),
        ("no row of the run has a time", run, "--impl", "skipped", "--export", "github-action-benchmark"),
    ):
        done = swiglu_bench("show", *arguments)
        assert done.code == 2
        assert words in done.err
