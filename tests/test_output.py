import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from courts import run_here
from places import SUPPORT
from specimens import a_record, small_case

from swiglu_bench import output
from swiglu_bench.cases.cases import Case, Dtype, Mode, Scope, Shape
from swiglu_bench.cases.registry import from_file
from swiglu_bench.contenders import peers, pytorch
from swiglu_bench.machine import machine, sources
from swiglu_bench.machine.machine import Machine
from swiglu_bench.measure.rounds import Rule
from swiglu_bench.output import Fingerprints, Remaining, key_of_case, key_of_row
from swiglu_bench.rows.figures import cell
from swiglu_bench.rows.record import Status
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
    assert remaining_of(rows_of(CASES), [*BOTH, peers.liger]).todo == CASES
    rows = rows_of(CASES)
    rows[0]["run_id"] = "another"
    assert remaining_of(rows).todo == CASES[:1]


def test_rows_of_another_command_do_not_count() -> None:
    memory = dataclasses.replace(SETTINGS, task=Task.MEMORY, command="swiglu-bench memory --shapes small")
    remaining = remaining_of(rows_of(CASES), settings=memory)
    assert remaining.todo == CASES
    assert remaining.replaced_by(a_record(tokens=1, mode="step")) is None


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


def test_all_that_matters_changes_the_fingerprint_and_nothing_else() -> None:
    changes: list[dict[str, Any]] = [
        {"task": Task.VERIFY}, {"device": torch.device("cuda")}, {"baseline": "compile"}, {"cold_l2": False},
        {"rule": Rule(budget_s=3.0)}, {"energy": False}, {"interpreter": True},
    ]  # fmt: skip
    found = [fingerprint(dataclasses.replace(SETTINGS, **change)) for change in changes]
    machines = [dataclasses.replace(THIS, **{name: "another"}) for name in (*sources.MACHINE, "tuned_tiles")]
    found += [fingerprint(this=this) for this in machines]
    cases = [*CASES, small_case(seed=1), small_case(dtype=Dtype.BFLOAT16), small_case(mode=Mode.FORWARD)]
    prints = Fingerprints(BOTH, SETTINGS, THIS)
    found += [prints.of(key_of_case(case), known.name) for case in cases for known in BOTH]
    assert len(set(found)) == len(found)
    other = dataclasses.replace(SETTINGS, command="swiglu-bench forward --out x --resume", run_id="run2", detail=True)
    assert fingerprint(other, chosen=BOTH[:1]) == fingerprint()


def test_the_source_of_a_user_s_file_changes_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    text = (SUPPORT / "user_implementations.py").read_text(encoding="utf-8")
    found = []
    for content in (text, text, text + "# changed\n"):
        file.write_text(content, encoding="utf-8")
        found.append(fingerprint(chosen=[from_file(f"{file}:mine")], name="mine"))
    assert found[0] == found[1] != found[2]


def test_what_its_process_has_loaded_changes_it(tmp_path: Path) -> None:
    """A module of its own, a package and a file that it reads; not what is installed, nor hidden folders."""
    for name, content in {
        "mine.py": "import sys\nsys.path.insert(0, __file__.rpartition('/')[0])\nimport helper_of_mine, parts_of_mine\n"
        "import json.tool\nopen(__file__.replace('mine.py', 'kernel of mine.cu')).read()\n"
        "open(__file__.replace('mine.py', '.hidden')).read()\n"
        "from swiglu_bench import Step, implementation\n"
        "@implementation('mine', scopes=['glu'], description='d')\n"
        "def mine(problem):\n    w = problem.weights\n"
        "    return Step(lambda x: helper_of_mine.silu(x @ w['w_gate'].T) * (x @ w['w_up'].T))\n",
        "helper_of_mine.py": "from torch.nn.functional import silu\n",
        "parts_of_mine/__init__.py": "open(__file__.replace('__init__.py', 'tiles.json')).read()",
        "parts_of_mine/tiles.json": "",
        "parts_of_mine/later.py": "",
        "kernel of mine.cu": "",
        ".hidden": "",
        "beside.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    mine = from_file(f"{tmp_path / 'mine.py'}:mine")
    mine = dataclasses.replace(mine.declared(), address=f"{tmp_path / 'mine.py'}:mine")
    settings = dataclasses.replace(SETTINGS, task=Task.VERIFY)
    (tmp_path / "logs").mkdir()
    (record,) = run_here(CASES[:1], [mine], settings, THIS, logs=tmp_path / "logs")
    assert record.status is Status.OK, record.reason
    named = [entry.rpartition("=")[0] for entry in record.files.split()]
    tiles = "parts_of_mine/tiles.json"
    assert named == ["helper_of_mine.py", "kernel%20of%20mine.cu", "mine.py", "parts_of_mine", tiles]
    remaining_of([], [mine], settings, CASES[:1]).stamp(record)
    row = {name: cell(value) for name, value in record.row().items()}

    def todo() -> list[Case]:
        return remaining_of([row], [mine], settings, CASES[:1]).todo

    assert todo() == []
    for name in ("beside.py", ".hidden", "helper_of_mine.py", "parts_of_mine/later.py", "kernel of mine.cu", tiles):
        before = (tmp_path / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text("# changed", encoding="utf-8")
        assert todo() == ([] if name in ("beside.py", ".hidden") else CASES[:1]), name
        (tmp_path / name).write_text(before, encoding="utf-8")
    (tmp_path / "helper_of_mine.py").unlink()
    assert todo() == CASES[:1]


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
        found.add(fingerprint(chosen=[peers.liger], name="liger"))
    assert len(found) == 2
