"""Markdown tables made from a records.csv, so that no figure in a document is typed by hand.

A document holds a marked block; `python -m swiglu_bench.writers.markdown README.md` (`make readme`) fills it again:

    <!-- table: results/nvidia-h200/2026-11-21/forward/records.csv eager compile liger -->
    <!-- end -->

Names after the path choose the rows; without any, all are shown. Among them `figure=limit_pct` shows that column of the
CSV instead of times, bytes as MiB, and `scope=mlp`, or another column, keeps the rows that have that value. A block
`<!-- training: PATH -->` is filled from a training's summary.csv, `<!-- ranks: PATH mode=step NAMES -->` from a tp.csv.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from swiglu_bench.rows.run_folder import read_records
from swiglu_bench.writers.tables import size

TRAINING = re.compile(r"(<!-- training: (?P<path>\S+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)
RANKS = re.compile(r"(<!-- ranks: (?P<path>\S+)(?P<words>[^>]*) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)
BLOCK = re.compile(r"(<!-- table: (?P<path>\S+)(?P<words>[^>]*) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)


def time_table(frame: pd.DataFrame) -> str:
    """Implementations down, token counts across: median time and ratio to the baseline, the fastest in bold."""
    timed = frame[frame["time_ms"].notna()]
    tokens = sorted(timed["tokens"].unique())
    best = timed[timed["comparable"]].groupby("tokens")["time_ms"].min()
    lines = _head(tokens)
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
                text += " (baseline)" if name == row["baseline"] else f" ({_ratio(row)})"
            elif not row["comparable"]:
                text += " (dX only)"
            cells.append(f"**{text}**" if row["comparable"] and row["time_ms"] == best[count] else text)
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def figure_table(frame: pd.DataFrame, figure: str) -> str:
    """Implementations down, token counts across: one figure of records.csv; bytes are shown as MiB.

    Raises ValueError where the rows have no such figure, or several for one cell.
    """
    if figure not in frame or not frame[figure].notna().any():
        raise ValueError(f"figure={figure}: these rows have no such figure; results/README.md names the columns.")
    known = frame[frame[figure].notna()]
    tokens = sorted(known["tokens"].unique())
    if known.duplicated(["implementation", "tokens"]).any():
        raise ValueError(f"figure={figure}: several rows for one cell; choose with scope=, mode=, dtype= or shape=.")
    lines = _head(tokens)
    for name in dict.fromkeys(known["implementation"]):
        mine = known[known["implementation"] == name].set_index("tokens")[figure]
        cells = [_figure_text(figure, mine[count]) if count in mine.index else "" for count in tokens]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def training_table(frame: pd.DataFrame) -> str:
    """Implementations down: curve, step time, its ratio to eager's, the expected one, memory kept."""
    lines = ["| | curve | step | ÷ eager's | expected | kept |", "| --- | --- | ---: | ---: | ---: | ---: |"]
    for row in frame[frame["step_ms"].notna()].to_dict("records"):
        curve, ratio, expected = "baseline", "baseline", ""
        if pd.notna(row["ratio"]):
            curve = row["curve"] if row["trains"] == "everything" else f"{row['curve']} (frozen)"
            ratio = _ratio(row)
            expected = f"{row['expected_ratio']:.3f}" + ("" if row["as_expected"] else " *")
        cells = [curve, f"{row['step_ms']:.1f} ms", ratio, expected, size(row["saved_bytes"])]
        lines.append(f"| `{row['implementation']}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ranks_table(frame: pd.DataFrame) -> str:
    """Token counts and numbers of GPUs down: the baseline's communication, then each implementation's time."""
    timed = frame[frame["time_ms"].notna() & (frame["ranks"] > 1)]
    names = list(dict.fromkeys(timed["implementation"]))
    lines = [
        "| tokens | GPUs | communication alone | bus, of its ceiling | "
        + " | ".join(f"`{name}`" for name in names)
        + " |",
        "| ---: | ---: | ---: | ---: |" + " ---: |" * len(names),
    ]
    for (tokens, ranks), rows in timed.groupby(["tokens", "ranks"]):
        if rows.duplicated("implementation").any():
            raise ValueError("Several rows for one cell; choose with mode=, shape= or sequence_parallel=.")
        of = {row["implementation"]: row for row in rows.to_dict("records")}
        base = of[next(name for name in names if of.get(name, {}).get("verdict") == "baseline")]
        cells = [f"{base['comm_ms']:.3f} ms", f"{base['bus_gbps']:.0f} of {base['bus_ceiling_gbps']:.0f} GB/s"]
        for name in names:
            row = of.get(name)
            if row is None:
                cells.append("")
                continue
            ratio = "baseline" if row is base else _ratio(row)
            cells.append(f"{row['time_ms']:.3g} ms ({ratio}), {row['efficiency']:.0%}")
        lines.append(f"| {tokens:,} | {ranks} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ratio(row: Mapping[Any, Any] | pd.Series) -> str:
    return f"{row['ratio']:.3f} ± {(row['ratio_high'] - row['ratio_low']) / 2:.3f}"


def _head(tokens: Sequence[int]) -> list[str]:
    return ["| tokens | " + " | ".join(f"{count:,}" for count in tokens) + " |", "| --- |" + " ---: |" * len(tokens)]


def _figure_text(figure: str, value: float) -> str:
    if figure.endswith("_bytes"):
        return f"{value / 2**20:,.0f} MiB"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def fill(document: Path) -> str:
    """The document's text with every marked table made again; paths are relative to the document."""

    def replace(match: re.Match[str]) -> str:
        chosen, figure = _choose(read_records(document.parent / match["path"]), match["words"])
        return f"{match[1]}{figure_table(chosen, figure) if figure else time_table(chosen)}\n{match['end']}"

    def replace_training(match: re.Match[str]) -> str:
        table = training_table(pd.read_csv(document.parent / match["path"]))
        return f"{match[1]}{table}\n{match['end']}"

    def replace_ranks(match: re.Match[str]) -> str:
        chosen, _ = _choose(pd.read_csv(document.parent / match["path"]), match["words"])
        return f"{match[1]}{ranks_table(chosen)}\n{match['end']}"

    text = document.read_text(encoding="utf-8")
    return RANKS.sub(replace_ranks, TRAINING.sub(replace_training, BLOCK.sub(replace, text)))


def _choose(frame: pd.DataFrame, words: str) -> tuple[pd.DataFrame, str | None]:
    """The rows that the words of a block choose, and the figure that they ask for."""
    names, options = parse(words)
    figure = options.pop("figure", None)
    for column, value in options.items():
        frame = frame[frame[column].astype(str) == value]
    return frame[frame["implementation"].isin(names)] if names else frame, figure


def parse(words: str) -> tuple[list[str], dict[str, str]]:
    """The names among the words of a block, and what they say as NAME=VALUE."""
    options = dict(word.split("=", 1) for word in words.split() if "=" in word)
    return [word for word in words.split() if "=" not in word], options


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(fill(Path(name)), encoding="utf-8")
