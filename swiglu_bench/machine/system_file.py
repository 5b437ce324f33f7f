"""Values in the files of an operating system, such as those of /proc and /sys on Linux."""

from __future__ import annotations

import re
from pathlib import Path


def value(path: Path, pattern: str = r"^(\S+)") -> str | None:
    """The group of a pattern's first match in a file, by default the first word; None without the file or a match."""
    try:
        found = re.search(pattern, path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return found[1] if found else None
