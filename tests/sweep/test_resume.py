import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from places import SUPPORT
from specimens import a_record, small_case

from swiglu_bench.implementations import liger, pytorch
from swiglu_bench.machine import machine, sources
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.rows.record import Record
from swiglu_bench.session.session import Session
from swiglu_bench.session.settings import Settings, Task
from swiglu_bench.spec.cases import Case, Dtype, Mode, Scope, Shape
from swiglu_bench.spec.registry import from_file
from swiglu_bench.sweep import resume
from swiglu_bench.sweep.resume import Fingerprints, Remaining, key_of_case, key_of_row

CPU = torch.device("cpu")
THIS = machine.describe(CPU)
SETTINGS = Settings(Task.TIME, CPU, "swiglu-bench forward --shapes small", "run1")
BOTH = (pytorch.eager, pytorch.eager_packed)
CASES = [small_case(tokens=tokens) for tokens in (1, 2)]


def rows_of(cases: list[Case], settings: Settings = SETTINGS) -> list[dict[str, str]]:
    """What a whole sweep leaves in records.csv."""
    plan, session = Remaining(cases, Fingerprints(BOTH, settings, THIS), settings.command), Session(settings, THIS)
    found = []
    for case in cases:
        for one in BOTH:
            record = session.blank(case, one)
            plan.stamp(record)
            found.append({name: str(value) for name, value in record.row().items()})
    return found


def plan_for(
    rows: list[dict[str, str]], chosen: Any = BOTH, settings: Settings = SETTINGS, cases: list[Case] = CASES
) -> Remaining:
    return Remaining(cases, Fingerprints(chosen, settings, THIS), settings.command, rows)


def test_a_case_and_its_rows_have_one_key() -> None:
    shape = Shape("two  words\n", 24, 40, "made up", (1,))
    for case in (small_case(), small_case(shape=shape), small_case(scope=Scope.MLP, mode=Mode.BACKWARD, seed=3)):
        record = Session(SETTINGS, THIS).blank(case, pytorch.eager)
        row = {name: " ".join(str(value).split()) for name, value in record.row().items()}
        assert key_of_case(case) == key_of_row(record) == key_of_row(row)


def test_without_rows_everything_is_to_do() -> None:
    assert plan_for([]).todo == CASES


def test_what_is_finished_is_kept() -> None:
    plan = plan_for(rows_of(CASES))
    assert plan.todo == []
    assert [row["implementation"] for row in plan.kept] == ["eager", "eager-packed"] * 2
    assert plan_for(rows_of(CASES[:1])).todo == CASES[1:]
    assert plan_for(rows_of(CASES), chosen=[pytorch.eager_packed]).todo == [], "each row has its ratio already"


def test_a_case_that_lacks_a_row_is_done_again() -> None:
    assert plan_for(rows_of(CASES)[:-1]).todo == CASES[1:]
    assert plan_for(rows_of(CASES), chosen=[*BOTH, liger.liger]).todo == CASES


def test_rows_of_two_runs_do_not_make_a_finished_case() -> None:
    rows = rows_of(CASES)
    rows[0]["run_id"] = "another"
    assert plan_for(rows).todo == CASES[:1]


def test_rows_of_another_command_do_not_count() -> None:
    memory = dataclasses.replace(SETTINGS, task=Task.MEMORY, command="swiglu-bench memory --shapes small")
    plan = plan_for(rows_of(CASES), settings=memory)
    assert plan.todo == CASES
    assert plan.replaced_by(a_record(tokens=1, mode="step")) is None


def test_the_last_of_several_rows_counts() -> None:
    old = [row | {"fingerprint": "old"} for row in rows_of(CASES)]
    assert plan_for(old + rows_of(CASES)).todo == []
    assert plan_for(rows_of(CASES) + old).todo == CASES


def test_only_the_rows_that_are_made_again_give_way() -> None:
    rows = [row | {"fingerprint": "old"} for row in rows_of(CASES)]
    rows.append(rows[0] | {"implementation": "left out now"})
    rows.append(rows[0] | {"command": "swiglu-bench memory"})
    plan = plan_for(rows)
    record = Session(SETTINGS, THIS).blank(CASES[0], pytorch.eager)
    gives_way = plan.replaced_by(record)
    assert gives_way is not None
    assert [row for row in rows if gives_way(row)] == rows[:2]
    assert plan.replaced_by(record) is None, "once for a case"


Changes: dict[str, Callable[[Settings], Settings]] = {
    "task": lambda how: dataclasses.replace(how, task=Task.VERIFY),
    "baseline": lambda how: dataclasses.replace(how, baseline="compile"),
    "cold_l2": lambda how: dataclasses.replace(how, cold_l2=False),
    "rule": lambda how: dataclasses.replace(how, rule=Rule(budget_s=3.0)),
    "regime": lambda how: dataclasses.replace(how, rule=Rule(rest_s=0.05)),
    "energy": lambda how: dataclasses.replace(how, energy=False),
    "interpreter": lambda how: dataclasses.replace(how, interpreter=True),
}


@pytest.mark.parametrize("name", Changes)
def test_a_setting_that_matters_changes_the_fingerprint(name: str) -> None:
    case = key_of_case(CASES[0])
    before, after = (Fingerprints(BOTH, how, THIS).of(case, "eager") for how in (SETTINGS, Changes[name](SETTINGS)))
    assert before != after


def test_what_does_not_matter_does_not() -> None:
    case = key_of_case(CASES[0])
    other = dataclasses.replace(SETTINGS, command="swiglu-bench forward --out x --resume", run_id="run2")
    assert Fingerprints(BOTH, SETTINGS, THIS).of(case, "eager") == Fingerprints(BOTH[:1], other, THIS).of(case, "eager")


@pytest.mark.parametrize("name", ["device", "driver", "torch", "triton", "cpu"])
def test_the_machine_and_the_versions_change_it(name: str) -> None:
    case, other = key_of_case(CASES[0]), dataclasses.replace(THIS, **{name: "another"})
    assert Fingerprints(BOTH, SETTINGS, THIS).of(case, "eager") != Fingerprints(BOTH, SETTINGS, other).of(case, "eager")


def test_case_and_implementation_change_it() -> None:
    prints = Fingerprints(BOTH, SETTINGS, THIS)
    cases = [*CASES, small_case(seed=1), small_case(dtype=Dtype.BFLOAT16), small_case(mode=Mode.FORWARD)]
    found = {prints.of(key_of_case(case), one.name) for case in cases for one in BOTH}
    assert len(found) == len(cases) * len(BOTH)
    assert all(len(one) == 16 for one in found)


def test_the_source_of_a_user_s_file_changes_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    text = (SUPPORT / "user_implementations.py").read_text(encoding="utf-8")
    found = []
    for content in (text, text, text + "# changed\n"):
        file.write_text(content, encoding="utf-8")
        found.append(Fingerprints([from_file(f"{file}:mine")], SETTINGS, THIS).of(key_of_case(CASES[0]), "mine"))
    assert found[0] == found[1] != found[2]


def test_the_suite_s_and_the_kernels_sources_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    case, before = key_of_case(CASES[0]), Fingerprints(BOTH, SETTINGS, THIS)
    real = sources._sources
    for package in sources.PACKAGES:
        monkeypatch.setattr(sources, "_sources", lambda name, changed=package: real(name) + "x" * (name == changed))
        assert Fingerprints(BOTH, SETTINGS, THIS).of(case, "eager") != before.of(case, "eager")


def test_the_version_of_the_package_that_is_measured_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("liger_kernel")
    case, before = key_of_case(CASES[0]), Fingerprints([liger.liger], SETTINGS, THIS)
    monkeypatch.setattr(resume.importlib.metadata, "version", lambda name: f"{name} of tomorrow")
    assert Fingerprints([liger.liger], SETTINGS, THIS).of(case, "liger") != before.of(case, "liger")


def test_tuned_tiles_change_it() -> None:
    case, before = key_of_case(CASES[0]), Fingerprints(BOTH, SETTINGS, THIS)
    tuned = dataclasses.replace(THIS, tuned_tiles="0123456789abcdef")
    assert Fingerprints(BOTH, SETTINGS, tuned).of(case, "eager") != before.of(case, "eager")


def test_a_record_is_stamped() -> None:
    plan = plan_for([])
    record: Record = Session(SETTINGS, THIS).blank(CASES[0], pytorch.eager)
    plan.stamp(record)
    assert record.fingerprint == Fingerprints(BOTH, SETTINGS, THIS).of(key_of_case(CASES[0]), "eager")
