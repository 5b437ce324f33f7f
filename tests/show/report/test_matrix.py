"""Who is first at each case, as the first table of a page has it."""

from typing import Any

import pytest

pytest.importorskip("altair", reason="the extra `report` is not installed")

from reported import EVIL, a_run, awkward_rows, timed

from swiglu_bench.machine import sources
from swiglu_bench.show.charts.style import PALETTE
from swiglu_bench.show.report import matrix, tables
from swiglu_bench.show.report.load import ReportedRun
from swiglu_bench.show.report.questions import colours, style_of
from swiglu_bench.show.report.sections import by_work, sections


def of(*runs: ReportedRun) -> dict[str, Any]:
    numbers = colours(runs)
    found = matrix.matrix([(one, style_of(one, numbers)) for one in by_work(sections(runs))])
    assert found
    return found


def test_winners_margins_and_ties() -> None:
    found = of(a_run(*awkward_rows()))
    (group,) = found["groups"]
    assert (found["counts"], found["baselines"], group["title"]) == (["1", "1k"], "eager", "forward of glu")
    alone, tied = group["lines"][0]["cells"]
    assert (alone["name"], alone["ties"], alone["speedup"], alone["next"]) == (EVIL, 0, "1.25×", "+25.0%")
    assert alone["colour"] in PALETTE
    assert tied["ties"] == 1
    assert found["sentence"].startswith("In all 4 cases an implementation is faster than eager, 1.25 times as fast;")


def test_where_nothing_beats_the_baseline_there_is_no_gain() -> None:
    found = of(a_run(timed("eager", 1, 1.0), timed("a", 1, 1.2)))
    ((cell,),) = (line["cells"] for line in found["groups"][0]["lines"])
    assert (cell["name"], cell["speedup"], cell["depth"], cell["next"]) == ("eager", "", 0, "+20.0%")
    assert "Nothing is faster than eager" in found["sentence"]


def test_runs_over_several_gpus_have_a_table_of_their_own() -> None:
    found = of(a_sweep(scope="glu"), a_sweep(scope="mlp-tp2"))
    assert [[group["title"] for group in found[name]] for name in ("groups", "split")] == [
        ["forward of glu"], ["forward of mlp-tp2"],
    ]  # fmt: skip


def a_sweep(**work: str) -> ReportedRun:
    return a_run(timed("eager", 1, 1.0, **work), timed("a", 1, 0.5, **work), name="-".join(work.values()))


@pytest.mark.parametrize(
    ("works", "titles"),
    [
        ([{"scope": "glu"}, {"scope": "new"}], ["forward of glu", "forward of new"]),
        ([{"routing": "uniform"}, {"routing": "zipf"}], ["forward of glu, uniform", "forward of glu, zipf"]),
    ],
)
def test_each_kind_of_work_has_rows_of_its_own(works: list[dict[str, str]], titles: list[str]) -> None:
    assert [group["title"] for group in of(*(a_sweep(**work) for work in works))["groups"]] == titles


def test_without_a_time_there_is_no_matrix() -> None:
    assert matrix.matrix([]) is None


def test_runs_of_other_kernels_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "standing", lambda version: ("", version == "old"))
    run = a_run(timed("eager", 1, 1.0, version="old"), timed("a", 1, 0.5, version="old"))
    assert of(run)["groups"][0]["lines"][0]["label"].endswith(tables.BEHIND)
    assert tables.marked_run(run) == "run" + tables.BEHIND
    assert not tables.marked("name", [], "new").endswith(tables.BEHIND)


def test_machines_show_what_differs() -> None:
    made = [
        ReportedRun(tables_path, {"machine": {"device": "GPU", "host": host, "memory_bytes": 1 << 30}}, [])
        for tables_path, host in zip(map(a_path, "ab"), ("one", "two"), strict=True)
    ]
    found = tables.machines(made)
    assert (found["differ"], found["lines"]) == (["host"], [(["a"], ["one"]), (["b"], ["two"])])
    assert found["same"] == {"device": "GPU", "memory": "1.0 GiB"}


def a_path(name: str) -> Any:
    return a_run(name=name).path


def test_kernels_are_behind_where_they_changed_since(tmp_path: Any) -> None:
    def git(*arguments: str) -> str:
        answer = sources.git(tmp_path, "-c", "user.name=n", "-c", "user.email=e", *arguments)
        assert answer is not None
        return answer

    kernels = tmp_path / "kernels" / "swiglu_kernels"
    kernels.mkdir(parents=True)
    git("init")
    (kernels / "a.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    version = f"1+{git('rev-parse', 'HEAD')}"
    standing = sources.standing.__wrapped__
    assert not standing(version, tmp_path)[1]
    (kernels / "a.py").write_text("2")
    assert standing(version, tmp_path)[1], "changed, and not committed"
    git("commit", "-am", "second")
    text, behind = standing(f"{version}-dirty", tmp_path)
    assert behind
    assert "changed in 1 commits since" in text
    assert standing("1+0123456789", tmp_path)[1], "not a commit of this checkout"
