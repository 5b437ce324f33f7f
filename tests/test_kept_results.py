"""Results that are kept are of a commit, and nothing of their runs is left beside them."""

import re
import subprocess
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_of_a_commit_and_nothing_else() -> None:
    listed = subprocess.run(["git", "ls-files", "results"], cwd=ROOT, capture_output=True, text=True, check=True)
    kept = [ROOT / line for line in listed.stdout.splitlines()]
    runs = [path for path in kept if path.name == "run.json" and path.exists()]
    assert runs
    for path in runs:
        assert "-dirty" not in path.read_text("utf-8"), path
    assert not [path for path in kept if path.name.startswith(".lock") or "logs" in path.parts]


def test_whatever_documents_quote_can_be_measured_again_or_is_a_record() -> None:
    """By a piece of results/regenerate.sh that has its name, or that of its folder; README.md lists the records."""
    script = (ROOT / "results" / "regenerate.sh").read_text("utf-8")
    (listed,) = re.findall(r'^pieces="(.*?)"', script, re.MULTILINE | re.DOTALL)
    pieces = listed.replace("\\\n", " ").split()
    for piece in pieces:
        assert re.search(rf"^ +{re.escape(piece)}\)", script, re.MULTILINE), piece
    quoted = set()
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        quoted |= set(re.findall(r"results/nvidia-h200/([\w.-]+)", page.read_text("utf-8")))
    assert len(quoted) > 20
    made = {*pieces, "report", "tp"}
    readme = (ROOT / "results" / "README.md").read_text("utf-8")
    section = readme.split("## Records of earlier tools")[1].split("\n## ")[0]
    first_cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    records = set()
    for pattern in re.findall(r"`(.*?)`", " ".join(first_cells)):
        found = {path.name for path in (ROOT / "results").glob(f"nvidia-*/{pattern}")}
        assert found, pattern
        records |= found
    assert not {name for name in quoted - records if name.rsplit(".", 1)[0] not in made and name not in made}


def test_the_newest_releases_passed_and_are_none_older_than_the_known_good() -> None:
    """`make test-latest` writes the file, and is due again when constraints.txt is renewed."""
    tried, known = (
        {canonicalize_name(name): Version(version) for name, version in re.findall(r"(?m)^([\w.-]+)==([^\s;]+)", text)}
        for text in ((ROOT / path).read_text("utf-8") for path in ("results/versions/latest.txt", "constraints.txt"))
    )
    assert {"torch", "triton", "transformers", "typer"} <= tried.keys() <= known.keys()
    assert not {name for name, version in tried.items() if version < known[name]}
    assert not re.findall(
        r"(?m)^(?:FAILED|ERROR) .*|\d+ failed", (ROOT / "results/versions/latest.txt").read_text("utf-8")
    )
