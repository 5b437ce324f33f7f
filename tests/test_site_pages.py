import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from places import ROOT

SOURCE = ROOT / "docs" / "site_pages.py"


@pytest.fixture(scope="module")
def site_pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_pages", SOURCE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_that_lead_nowhere(site_pages: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "index.html").write_text(
        '<a href="docs/page.html#x"> <a href="https://example.org/"> <a href="#top"> <a href="docs"> <img src="no.svg">'
    )
    (tmp_path / "docs" / "page.html").write_text(
        '<a href="../index.html?q"> <picture><source srcset="a%20b.svg"><img src="../docs/a%20b.svg"></picture>'
        '<a href="../gone.html#x">'
    )
    (tmp_path / "docs" / "a b.svg").touch()
    assert list(site_pages.broken_links(tmp_path)) == [
        ("docs/page.html", "../gone.html#x"),
        ("index.html", "docs"),
        ("index.html", "no.svg"),
    ]


def test_every_path_of_a_navigation_is_found(site_pages: ModuleType) -> None:
    nav = [{"a": "README.md"}, {"b": [{"c": "docs/c.md"}, "d.md"]}]
    assert list(site_pages._documents(nav)) == ["README.md", "docs/c.md", "d.md"]
