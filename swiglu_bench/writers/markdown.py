"""Markdown tables made from a records.csv, so that no figure in a document is typed by hand.

A document holds a marked block; `python -m swiglu_bench.writers.markdown README.md` (`make readme`) fills it again:

    <!-- table: results/nvidia-h200/2026-11-21/forward/records.csv eager compile liger -->
    <!-- end -->

Names after the path choose the rows; without any, all are shown.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pandas as pd

from swiglu_bench.writers.csv_file import read_records

BLOCK = re.compile(r"(<!-- table: (?P<path>\S+)(?P<names>[^>]*) -->\n).*?(<!-- end -->)", re.DOTALL)


def time_table(frame: pd.DataFrame) -> str:
    """Implementations down, token counts across: median time and ratio to the baseline, the fastest in bold."""
    timed = frame[frame["time_ms"].notna()]
    tokens = sorted(timed["tokens"].unique())
    best = timed[timed["comparable"]].groupby("tokens")["time_ms"].min()
    lines = ["| tokens | " + " | ".join(f"{count:,}" for count in tokens) + " |", "| --- |" + " ---: |" * len(tokens)]
    for name in dict.fromkeys(timed["implementation"]):
        mine = timed[timed["implementation"] == name].set_index("tokens")
        cells = []
        for count in tokens:
            if count not in mine.index:
                cells.append("")
                continue
            row = mine.loc[count]
            text = f"{row['time_ms']:.3f} ms"
            if pd.notna(row["ratio"]):
                half = (row["ratio_high"] - row["ratio_low"]) / 2
                text += " (baseline)" if name == row["baseline"] else f" ({row['ratio']:.3f} ± {half:.3f})"
            elif not row["comparable"]:
                text += " (dX only)"
            cells.append(f"**{text}**" if row["comparable"] and row["time_ms"] == best[count] else text)
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def fill(document: Path) -> str:
    """The document's text with every marked table made again; paths are relative to the document."""

    def replace(match: re.Match[str]) -> str:
        frame = read_records(document.parent / match["path"])
        names = match["names"].split()
        chosen = frame[frame["implementation"].isin(names)] if names else frame
        return f"{match[1]}{time_table(chosen)}\n{match[4]}"

    return BLOCK.sub(replace, document.read_text(encoding="utf-8"))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(fill(Path(name)), encoding="utf-8")
