"""Whatever is typed, and whatever a YAML file holds: no traceback, and an exit status that the README knows."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from swiglu_bench.cli import app
from swiglu_bench.implementations import CATALOGUE
from swiglu_bench.processes import parent
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.session import session as runner
from swiglu_bench.spec.cases import Case
from swiglu_bench.spec.implementation import Implementation

COMMANDS = ("forward", "backward", "step", "memory", "verify")
KNOWN = {0, 1, 2, 130}


@pytest.fixture(autouse=True)
def _stubbed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is measured; every contender of the first cases gets a row, ended in each of the ways in turn."""

    def run(cases: Sequence[Case], chosen: Sequence[Implementation], how: Any, this: Any, *_: Any) -> Iterator[Record]:
        session = runner.Session(how, this)
        for number, case in enumerate(cases[:2]):
            for one in chosen:
                status = [Status.SKIPPED, Status.INCORRECT, Status.ERROR][number % 3]
                yield session.blank(case, one).end(status, "It is only pretended.")

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(parent, "run", lambda *given, **_: run(*given))
    monkeypatch.setattr("swiglu_bench.processes.forkserver.start", lambda: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))


def status_of(*arguments: str) -> int:
    """The exit status of the command; an exception that is not caught comes through."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["swiglu-bench", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
            app.main()
    finally:
        sys.argv = before
    status = int(ended.value.code or 0)
    assert "Traceback" not in out.getvalue() + err.getvalue()
    assert (status == 2) == err.getvalue().startswith("Error: "), (arguments, err.getvalue())
    return status


WORDS = "- -- , 0 -1 1 1k 1e9 nan inf smoke 24x40 0x0 ../x a/b.yaml / x:y fp32 bf16 glu mlp,glu eager fuse* [ x.py:y"
OPTIONS = (
    "--shapes --tokens --dtype --scope --impl --skip-impl --seed --device --baseline --budget --l2 --out --timeout "
    "--wandb-project --what -h --help --resume --no-csv --csv --dry-run --in-process --no-wait --wait --version"
)
words = st.one_of(st.text(max_size=12), st.sampled_from([*WORDS.split(), "", "cuda:9", "cold", "\0", "\udc80", "é"]))
options = st.sampled_from(OPTIONS.split())
pieces = st.one_of(options, words, st.tuples(options, words).map("=".join))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([*COMMANDS, "inspekt", ""]), st.lists(pieces, max_size=6))
@example("forward", ["--out", "x", "--resume"])
@example("forward", ["--out", "\0"])
@example("forward", ["--shapes", "\0.yaml"])
@example("forward", ["--impl", "\0.py:x"])
@example("verify", ["--out", ""])
@example("forward", ["--budget", "nan"])
@example("forward", ["--timeout", "nan"])
@example("forward", ["--seed", "9" * 30])
@example("forward", ["--impl", "eager", "--out", "x" * 300])
def test_any_command_line(command: str, arguments: list[str]) -> None:
    assert status_of(command, "--device", "cpu", *arguments) in KNOWN


valid = st.sampled_from(["smoke", "24x40", "odd"])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(COMMANDS), valid, st.lists(st.integers(1, 2**20), min_size=1, max_size=3),
    st.sampled_from([one.name for one in CATALOGUE]), st.booleans(),
    st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1, max_size=20),
)  # fmt: skip
def test_any_sensible_command_line_runs(
    command: str, shapes: str, tokens: list[int], impl: str, resume: bool, out: str
) -> None:
    arguments = [command, "--shapes", shapes, "--tokens", ",".join(map(str, tokens)), "--impl", impl, "--device", "cpu"]
    arguments += [f"--out=out{out}", *(["--resume"] if resume else [])]
    assert status_of(*arguments) in {0, 1}


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=10),
    st.sampled_from([4096, "smoke", "source"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(scalars, st.just("hidden")), inner, max_size=4)
    ),
    max_leaves=8,
)
keys = st.one_of(st.sampled_from(["hidden", "intermediate", "source", "tokens", "shapes"]), st.text(max_size=5))
documents = st.one_of(
    st.dictionaries(keys, values, max_size=5).map(yaml.safe_dump),
    values.map(yaml.safe_dump),
    st.text(max_size=60),
    st.text("!&*<>{}[]:,-?|%@`\"' \n\tabc0", max_size=60),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents)
@example("hidden: 8\nintermediate: 8\nsource: s\ntokens: [1]")
@example("hidden: !!python/object/apply:os.system ['touch pwned']\nintermediate: 8\nsource: s")
@example("&a [*a]")
@example("? {a: 1}\n: 2")
def test_any_yaml_file(text: str) -> None:
    Path("mine.yaml").write_text(text, encoding="utf-8", errors="replace")
    assert status_of("forward", "--shapes", "mine.yaml", "--device", "cpu", "--dry-run") in {0, 2}
    assert not Path("pwned").exists()


def test_a_yaml_file_that_asks_for_python_is_refused_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text("hidden: !!python/object/apply:os.system ['touch pwned']\n", encoding="utf-8")
    assert status_of("forward", "--shapes", "mine.yaml") == 2
    assert not Path("pwned").exists()
