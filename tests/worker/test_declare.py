"""What other packages and files declare, their code run in a process of its own."""

import dataclasses
import re
from pathlib import Path

import bad_implementations as bad
import pytest
import user_implementations as mine
from specimens import small_case

from swiglu_bench.cases import registry
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.check.inputs import make_problem
from swiglu_bench.worker.court import declare

MINE = """from swiglu_bench import Step, implementation
from swiglu_bench.cases.implementation import Implementation

@implementation("mine", scopes=["glu"], description="d")
def mine(problem):
    return Step(lambda x: x)

"""


def test_what_a_file_declares_comes_without_its_code() -> None:
    address = f"{mine.__file__}:frozen"
    declared = declare(address, 60.0)
    assert declared == dataclasses.replace(mine.frozen.declared(), source=declared.source)
    assert (declared.address, declared.file) == (address, mine.__file__)
    with pytest.raises(AssertionError, match="has declarations only"):
        declared.build(make_problem(small_case(), "cpu"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise RuntimeError('not\\ntoday')", r"bad\.py .*RuntimeError: not today"),
        ("import os; print('bye', flush=True); os._exit(9)", r"exit status 9; .*import\.log ends: bye"),
        ("import sys; sys.exit(2)", r"bad\.py .*SystemExit: 2"),
        ("while True: pass", r"bad\.py:mine .*--timeout"),
        ("mine = 3", r"bad\.py has no implementation 'mine'"),
        ("import json; json.dumps = lambda *_: '[]'", r"bad\.py:mine .*malformed"),
        (MINE + "object.__setattr__(mine, 'name', 'eager (twin 1)')", r"called 'eager \(twin 1\)'"),
        (
            MINE + "data = mine.as_data()\nImplementation.as_data = lambda self: data | {'name': 'bare products 0'}",
            r"called 'bare products 0'",
        ),
        (MINE + "Implementation.as_data = lambda self: {'name': 'eager'}", r"malformed declaration"),
        (MINE + "Implementation.as_data = lambda self: 7", r"malformed declaration"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused_before_the_work(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "bad.py").write_text(text, encoding="utf-8")
    with pytest.raises(BadInput) as refused:
        declare(f"{tmp_path / 'bad.py'}:mine", 2.0 if "while" in text else 60.0)
    assert re.search(reason, str(refused.value)), refused.value
    assert "\n" not in str(refused.value)


def test_an_entry_point_is_loaded_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(
        "[swiglu_bench.implementations]\ntheirs = theirs_module:sound\nworse = theirs_worse:x\n", encoding="utf-8"
    )
    (tmp_path / "theirs_module.py").write_text(Path(bad.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "theirs_worse.py").write_text("import os; os.abort()", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    good, worse = registry.entry_point_addresses()
    theirs = declare(good, 60.0)
    assert (theirs.name, theirs.source) == ("sound", "theirs_module")
    assert registry.find(theirs).build is not theirs.build
    with pytest.raises(BadInput, match=r"worse = theirs_worse:x .* SIGABRT"):
        declare(worse, 60.0)
