import runpy
from pathlib import Path

from places import ROOT


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    broken_links = runpy.run_path(str(ROOT / "docs" / "site_pages.py"))["broken_links"]
    (tmp_path / "docs").mkdir()
    (tmp_path / "index.html").write_text(
        '<a href="docs/page.html#x"> <a href="https://example.org/"> <a href="#top"> <a href="docs"> <img src="no.svg">'
    )
    (tmp_path / "docs" / "page.html").write_text(
        '<a href="../index.html?q"> <picture><source srcset="a%20b.svg"><img src="../docs/a%20b.svg"></picture>'
        '<a href="../gone.html#x">'
    )
    (tmp_path / "docs" / "a b.svg").touch()
    assert list(broken_links(tmp_path)) == [
        ("docs/page.html", "../gone.html#x"),
        ("index.html", "docs"),
        ("index.html", "no.svg"),
    ]
