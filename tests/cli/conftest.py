from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command leaves in the working directory is gone with the test."""
    monkeypatch.chdir(tmp_path)
