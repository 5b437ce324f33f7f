"""What the site is made of, for MkDocs: the documents of the checkout at their own places, and a check of their links.

MkDocs knows one folder of documents. Here they lie where a reader of the repository looks for them: the README at the
top, the columns of the results beside the results. So the site takes every document that `nav` in mkdocs.yml names, by
its path in the checkout, and every file that may be linked or shown. Pages then link to each other as they do in the
repository, and no text exists twice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
_RESULTS = (
    "*.png", "*.txt", "records.csv", "summary.csv", "tp.csv",
    "fp8-kernels.csv", "*-grid.csv", "parts.csv", "weight-grad.csv", "waves.csv", "ragged.csv", "grid*.csv",
    "bare-product*.csv", "experts-few-copy*.csv",
)  # fmt: skip
SHOWN = (
    "docs/figures/*.svg",
    "docs/figures/*.png",
    "docs/site.css",
    *(f"results/**/{name}" for name in _RESULTS),
    "LICENSE",
)
"""What documents may show or link to besides each other."""
LINKS = {"a": ("href",), "img": ("src",), "source": ("srcset",), "link": ("href",), "script": ("src",)}

log = logging.getLogger("mkdocs.hooks.site_pages")


def on_files(files: Any, config: Any) -> Any:
    """The theme's files, the documents of `nav` and those beside this file, and what they show."""
    from mkdocs.structure.files import File, Files

    documents = [*_documents(config.nav), *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
    shown = [path.relative_to(ROOT).as_posix() for pattern in SHOWN for path in sorted(ROOT.glob(pattern))]
    own = [
        File(path, src_dir=str(ROOT), dest_dir=config.site_dir, use_directory_urls=False)
        for path in dict.fromkeys([*documents, *shown])
        if (ROOT / path).is_file()  # MkDocs itself complains about an entry of `nav` without a file
    ]
    return Files([*(file for file in files if file.src_dir != config.docs_dir), *own])


def on_post_build(config: Any) -> None:
    """Warn of every link and picture of the built pages that leads nowhere, raw HTML included."""
    for page, target in broken_links(Path(config.site_dir)):
        log.warning("%s: %r leads nowhere; link to a document of `nav` or to a file of SHOWN.", page, target)


def broken_links(site: Path) -> Iterator[tuple[str, str]]:
    """Each page of a built site, by its path in it, with each relative link of it for which there is no file."""
    for page in sorted(site.rglob("*.html")):
        found = _Targets()
        found.feed(page.read_text(encoding="utf-8"))
        for target in found.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc or not parts.path or page.name == "404.html":  # 404 is served anywhere
                continue
            if not (page.parent / unquote(parts.path)).is_file():
                yield page.relative_to(site).as_posix(), target


def _documents(entry: Any) -> Iterator[str]:
    """The paths in `nav`."""
    if isinstance(entry, str):
        yield entry
    for part in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from _documents(part)


class _Targets(HTMLParser):
    """Collects what the elements of a page refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.targets += [value for name, value in attrs if value and name in LINKS.get(tag, ())]
