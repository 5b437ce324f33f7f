import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from places import SUPPORT
from specimens import a_record, small_case

from swiglu_bench import output
from swiglu_bench.cases.cases import Case, Dtype, Mode, Scope, Shape
from swiglu_bench.cases.registry import from_file
from swiglu_bench.contenders import liger, pytorch
from swiglu_bench.machine import machine, sources
from swiglu_bench.machine.machine import Machine
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.output import Fingerprints, Remaining, key_of_case, key_of_row
from swiglu_bench.rows.figures import cell
from swiglu_bench.worker import policy
from swiglu_bench.worker.policy import Settings, Task

CPU = torch.device("cpu")
THIS = machine.describe(CPU)
SETTINGS = Settings(Task.TIME, CPU, "swiglu-bench forward --shapes small", "run1")
BOTH = (pytorch.eager, pytorch.eager_packed)
CASES = [small_case(tokens=tokens) for tokens in (1, 2)]


def rows_of(cases: list[Case], settings: Settings = SETTINGS) -> list[dict[str, str]]:
    """The content of records.csv after a whole sweep."""
    remaining = remaining_of([], settings=settings, cases=cases)
    found = []
    for case in cases:
        for one in BOTH:
            record = policy.blank(settings, THIS, case, one)
            remaining.stamp(record)
            found.append({name: cell(value) for name, value in record.row().items()})
    return found


def remaining_of(
    rows: list[dict[str, str]], chosen: Any = BOTH, settings: Settings = SETTINGS, cases: list[Case] = CASES
) -> Remaining:
    return Remaining(cases, Fingerprints(chosen, settings, THIS), settings.command, rows)


def test_a_case_and_its_rows_have_one_key() -> None:
    shape = Shape("two  words\n", 24, 40, "made up", (1,))
    for case in (small_case(), small_case(shape=shape), small_case(scope=Scope.EXPERTS, mode=Mode.BACKWARD, seed=3)):
        record = policy.blank(SETTINGS, THIS, case, pytorch.eager)
        row = {name: cell(value) for name, value in record.row().items()}
        assert key_of_case(case) == key_of_row(record) == key_of_row(row)


def test_what_is_finished_is_kept() -> None:
    assert remaining_of([]).todo == CASES
    remaining = remaining_of(rows_of(CASES))
    assert remaining.todo == []
    assert [row["implementation"] for row in remaining.kept] == ["eager", "eager-packed"] * 2
    assert remaining_of(rows_of(CASES[:1])).todo == CASES[1:]
    assert remaining_of(rows_of(CASES), [pytorch.eager_packed]).todo == [], "each row has its ratio already"


def test_a_case_that_lacks_a_row_or_has_rows_of_two_runs_is_run_again() -> None:
    assert remaining_of(rows_of(CASES)[:-1]).todo == CASES[1:]
    assert remaining_of(rows_of(CASES), [*BOTH, liger.liger]).todo == CASES
    rows = rows_of(CASES)
    rows[0]["run_id"] = "another"
    assert remaining_of(rows).todo == CASES[:1]


def test_rows_of_another_command_do_not_count() -> None:
    memory = dataclasses.replace(SETTINGS, task=Task.MEMORY, command="swiglu-bench memory --shapes small")
    remaining = remaining_of(rows_of(CASES), settings=memory)
    assert remaining.todo == CASES
    assert remaining.replaced_by(a_record(tokens=1, mode="step")) is None


def test_the_last_of_several_rows_counts() -> None:
    old = [row | {"fingerprint": "old"} for row in rows_of(CASES)]
    assert remaining_of(old + rows_of(CASES)).todo == []
    assert remaining_of(rows_of(CASES) + old).todo == CASES


def test_only_the_rows_that_are_made_again_are_replaced() -> None:
    rows = [row | {"fingerprint": "old"} for row in rows_of(CASES)]
    rows.append(rows[0] | {"implementation": "left out now"})
    rows.append(rows[0] | {"command": "swiglu-bench memory"})
    remaining = remaining_of(rows)
    record = policy.blank(SETTINGS, THIS, CASES[0], pytorch.eager)
    outdated = remaining.replaced_by(record)
    assert outdated is not None
    assert [row for row in rows if outdated(row)] == rows[:2]
    assert remaining.replaced_by(record) is None, "once for a case"


def fingerprint(how: Settings = SETTINGS, this: Machine = THIS, chosen: Any = BOTH, name: str = "eager") -> str:
    return Fingerprints(chosen, how, this).of(key_of_case(CASES[0]), name)


@pytest.mark.parametrize(
    "change",
    [
        {"task": Task.VERIFY}, {"device": torch.device("cuda")}, {"baseline": "compile"}, {"cold_l2": False},
        {"rule": Rule(budget_s=3.0)}, {"rule": Rule(rest_s=0.05)}, {"energy": False}, {"interpreter": True},
    ],
)  # fmt: skip
def test_a_setting_that_matters_changes_the_fingerprint(change: dict[str, Any]) -> None:
    assert fingerprint(dataclasses.replace(SETTINGS, **change)) != fingerprint()


def test_what_does_not_matter_does_not() -> None:
    other = dataclasses.replace(SETTINGS, command="swiglu-bench forward --out x --resume", run_id="run2", detail=True)
    assert fingerprint(other, chosen=BOTH[:1]) == fingerprint()


@pytest.mark.parametrize("name", [*sources.MACHINE, "tuned_tiles"])
def test_the_machine_and_the_versions_change_it(name: str) -> None:
    assert fingerprint(this=dataclasses.replace(THIS, **{name: "another"})) != fingerprint()


def test_case_and_implementation_change_it() -> None:
    prints = Fingerprints(BOTH, SETTINGS, THIS)
    cases = [*CASES, small_case(seed=1), small_case(dtype=Dtype.BFLOAT16), small_case(mode=Mode.FORWARD)]
    assert len({prints.of(key_of_case(case), one.name) for case in cases for one in BOTH}) == len(cases) * len(BOTH)


def test_the_source_of_a_user_s_file_changes_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    text = (SUPPORT / "user_implementations.py").read_text(encoding="utf-8")
    found = []
    for content in (text, text, text + "# changed\n"):
        file.write_text(content, encoding="utf-8")
        found.append(fingerprint(chosen=[from_file(f"{file}:mine")], name="mine"))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("package", sources.PACKAGES)
def test_the_suite_s_and_the_kernels_sources_change_it(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    before, really = fingerprint(), sources._sources
    monkeypatch.setattr(sources, "_sources", lambda name: really(name) + "x" * (name == package))
    assert fingerprint() != before


def test_the_version_of_the_package_that_is_measured_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_distributions", lambda: {"liger_kernel": ["liger-kernel"]})
    found = set()
    for version in ("1", "2"):
        monkeypatch.setattr(output.importlib.metadata, "version", lambda name, version=version: version)
        found.add(fingerprint(chosen=[liger.liger], name="liger"))
    assert len(found) == 2
