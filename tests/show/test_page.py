"""The page as a file, as a parser sees it, and as a browser draws it; what stands in its tables."""

import html.parser
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("altair", reason="the extra `report` is not installed")
pytest.importorskip("vl_convert", reason="the extra `report` is not installed")

from reported import EVIL, EVIL_SHAPE, a_run, audited, awkward, awkward_rows, timed, trained

from swiglu_bench.machine import sources
from swiglu_bench.rows.finished_run import FinishedRun
from swiglu_bench.show import page as pages
from swiglu_bench.show.charts import PALETTE, colours, style_of
from swiglu_bench.show.page import page
from swiglu_bench.show.sections import by_work, load, sections

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
NEEDS_BROWSER = pytest.mark.skipif(not BROWSER, reason="no Chromium or Chrome is installed")


class Elements(html.parser.HTMLParser):
    """Every tag with its attributes, and the text outside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data


@pytest.fixture(scope="module")
def awkward_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs")
    runs = [awkward(folder / "run"), audited(folder / "audit"), trained(folder / "train")]
    return page([load(run) for run in runs], f"swiglu-bench report '{EVIL}'")


@pytest.fixture(scope="module")
def found(awkward_page: str) -> Elements:
    return Elements(awkward_page)


def test_nothing_is_fetched(found: Elements, awkward_page: str) -> None:
    for tag, attributes in found.tags:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "form"}, tag
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    (policy,) = [a["content"] for tag, a in found.tags if tag == "meta" and "http-equiv" in a]
    assert "default-src 'none'" in str(policy)
    assert "http" not in str(policy)
    data, _libraries, own = found.scripts
    style = awkward_page[awkward_page.index("<style>") : awkward_page.index("</style>")]
    assert not re.search(r"https?:|url\(|@import|fetch\(", data + own + style)


def test_names_are_text(found: Elements) -> None:
    assert len(found.scripts) == 3
    for text in (EVIL, EVIL_SHAPE, "It broke: <b>out of memory</b> & more", "fail for <i>reasons</i>"):
        assert text in found.text
    assert not [tag for tag, _ in found.tags if tag in {"b", "i"}]
    assert EVIL in json.dumps(json.loads(found.scripts[0]), ensure_ascii=False).replace('\\"', '"')


def test_everything_is_said(found: Elements) -> None:
    text = " ".join(found.text.split())
    for wanted in (
        "It has no glu scope.", "output: too far", "1 pass, 1 fail, 1 unsupported, 1 not run", "A GPU & more",
        f"swiglu-bench forward --impl '{EVIL}'", "fewer gradients", "0.800 ± 0.005 faster", "1.003 ± 0.005 tie",
        "5 of 6 trained to the end", "differs (frozen)", "0.990 ± 0.002", f"swiglu-bench report '{EVIL}'",
    ):  # fmt: skip
        assert wanted in text, wanted


@NEEDS_BROWSER
def test_a_browser_draws_every_open_chart_without_a_complaint(awkward_page: str, tmp_path: Path) -> None:
    """Without any network."""
    file = tmp_path / "report.html"
    file.write_text(awkward_page, encoding="utf-8")
    done = subprocess.run(
        [
            str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
            "--disable-component-update", "--disable-features=NetworkTimeServiceQuerying", "--no-first-run",
            "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom",
            "--window-size=1280,900", "--enable-logging=stderr", "--virtual-time-budget=20000", file.as_uri(),
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    assert 'data-drawn="2"' in done.stdout, done.stdout[:500]  # of a time section and a training, each its first
    assert "<title>SwiGLU on" in done.stdout  # no name ran as a script


def test_a_name_has_one_colour_in_all_charts_legends_and_cells(found: Elements) -> None:
    scales: list[dict[str, Any]] = []

    def look(part: Any) -> None:
        for name, value in part.items() if isinstance(part, dict) else enumerate(part):
            if name == "color" and isinstance(value, dict) and "scale" in value:
                scales.append(value["scale"])
            elif isinstance(value, (dict, list)):
                look(value)

    look(json.loads(found.scripts[0])["charts"])
    colours_of: dict[str, set[str]] = {}
    for scale in scales:
        for name, colour in zip(scale["domain"], scale["range"], strict=True):
            colours_of.setdefault(name.removesuffix(" *"), set()).add(colour)
    assert len(scales) > 5
    assert {len(own) for own in colours_of.values()} == {1}
    cells = [str(attributes["style"]) for tag, attributes in found.tags if tag == "td" and "style" in attributes]
    assert cells
    assert all(colour in cell for cell in cells for colour in colours_of[EVIL]), "it is the first at every case"


def of(*runs: FinishedRun) -> list[dict[str, Any]]:
    numbers = colours(runs)
    found = [pages.won(each, style_of(each, numbers)) for each in by_work(sections(runs))]
    return [won for won in found if won]


def test_winners_margins_and_ties() -> None:
    (found,) = of(a_run(*awkward_rows()))
    assert (found["counts"], found["baseline"], found["cases"]) == (["1", "1k"], "eager", 4)
    alone, tied = found["lines"][0]["cells"]
    assert (alone["first"], alone["level"], alone["times"]) == ([EVIL], False, "1.25")
    assert alone["colour"] in PALETTE
    assert sorted(tied["first"]) == sorted([EVIL, "level"])
    assert found["first"] == [(EVIL, 4), ("level", 2)]


def test_what_ties_has_a_range_of_speeds() -> None:
    (found,) = of(a_run(timed("eager", 1, 1.0), timed("a", 1, 0.5, 0.05), timed("b", 1, 0.55, 0.05)))
    (cell,) = found["lines"][0]["cells"]
    assert (cell["first"], cell["times"], found["times"]) == (["a", "b"], "1.82 to 2.00", "1.82 to 2.00")


def test_no_two_sections_have_the_same_title_and_several_gpus_stand_apart() -> None:
    rows = [timed("eager", 1, 1.0), timed("a", 1, 0.5)]
    split = [replace(row, kind="tp", scope="mlp-tp2", ranks=2) for row in rows]
    runs = [a_run(*rows, name="one"), a_run(*rows, name="two"), a_run(*split, name="split")]
    found = Elements(page(runs, "swiglu-bench report"))
    headings = re.findall(r"(?:Forward|Split)[^\n]*", found.text)
    one, two = (f"Forward of glu, float32 ({name})" for name in ("one", "two"))
    apart = ["Split over several GPUs", *["Forward of mlp-tp2, float32"] * 2]
    assert headings == [one, two, one, two, *apart], "each in the first table and above its section"


def test_runs_of_other_kernels_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "standing", lambda version: ("", version == "old"))
    run = a_run(timed("eager", 1, 1.0, version="old"), timed("a", 1, 0.5, version="old"))
    assert of(run)[0]["lines"][0]["label"].endswith(pages.BEHIND)
    assert pages.marked_run(run) == "run" + pages.BEHIND
    assert not pages.marked("name", [], "new").endswith(pages.BEHIND)


def test_machines_show_what_differs() -> None:
    same, hosts = {"device": "GPU", "memory_bytes": 1 << 30}, {"a": "1", "b": "2"}
    found = pages.machines([FinishedRun([], {"machine": same | {"host": hosts[name]}}, Path(name)) for name in hosts])
    assert (found["differ"].heads, found["differ"].rows) == (["runs", "host"], [["a", "1"], ["b", "2"]])
    assert found["same"] == {"device": "GPU", "memory": "1.0 GiB"}


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
