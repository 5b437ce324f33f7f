"""Results that are kept are of a commit, and nothing of their runs is left beside them."""

import subprocess
from pathlib import Path

import pytest

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
