"""Whatever is typed: no traceback, and an exit status that the README knows."""

from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import swiglu_bench
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from swiglu_bench import loop
from swiglu_bench.machine import machine
from swiglu_bench.options import COMMANDS
from swiglu_bench.rows.record import Record, Status
from swiglu_bench.worker import policy
from swiglu_bench.worker.places import Work

QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def _nothing_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every contender of the first cases gets a row, ended in each of the ways in turn."""

    def rows(places: Any, cases: Sequence[Any], work: Work, *_: Any) -> Generator[Record]:
        chosen, blank = work.implementations, partial(policy.blank, work.settings, this)
        for number, case in enumerate(cases[:2]):
            status = [Status.SKIPPED, Status.INCORRECT, Status.ERROR][number % 3]
            yield from (blank(case, one).end(status, "It is only pretended.") for one in chosen)

    this = machine.describe(machine.find_device("cpu"))
    monkeypatch.setattr(machine, "describe", lambda device: this)
    monkeypatch.setattr(loop, "rows", rows)
    monkeypatch.setattr("swiglu_bench.worker.forkserver.start", lambda *_: None)
    monkeypatch.chdir(tmp_path)


WORDS = "- -- , 0 -1 1 1k 1e9 nan inf smoke 24x40 0x0 ../x a/b.yaml / x:y fp32 bf16 glu mlp,glu eager fuse* [ x.py:y"
OPTIONS = (
    "--shapes --tokens --dtype --scope --impl --skip-impl --seed --device --baseline --budget --l2 --out --timeout "
    "--wandb-project --what -h --help --resume --force --no-csv --csv --dry-run --in-process --no-wait --wait --version"
)
words = st.one_of(st.text(max_size=12), st.sampled_from([*WORDS.split(), "", "cuda:9", "cold", "\0", "\udc80", "é"]))
options = st.sampled_from(OPTIONS.split())
pieces = st.one_of(options, words, st.tuples(options, words).map("=".join))


@settings(QUICK, max_examples=100)
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
    assert swiglu_bench(command, "--device", "cpu", *arguments).code in {0, 1, 2, 130}
