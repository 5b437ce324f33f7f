"""A section in sentences: who wins where and by how much, who ties, who is slower, and what spoils the figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pandas as pd

from swiglu_bench.charts.style import Style, tokens_text
from swiglu_bench.report import ranking
from swiglu_bench.report.frames import dicts, groups, unique
from swiglu_bench.report.ranking import Place
from swiglu_bench.report.sections import Section
from swiglu_bench.writers.tables import several_gpus

Case = tuple[str, int]
SEVERAL = 3
"""Cases of more shapes than these are counted instead of listed."""
MANY = 6
"""More sentences about winners than these are not read."""


def sentences(section: Section, style: Style) -> list[str]:
    """The most important first."""
    tell = {"time": _times, "memory": _memory, "verify": _errors}[section.kind]
    return [*tell(section, style), *_absent(section)]


def headline(section: Section, style: Style) -> str:
    """What the section says in short: who wins where; of memory and errors the first sentence."""
    if section.kind != "time":
        return sentences(section, style)[0]
    found = ranking.places(section.rows)
    return " ".join(_winners(found, section, style)) if found else sentences(section, style)[0]


def together(names: Sequence[str], between: str = "and") -> str:
    """'a, b and c'."""
    return f" {between} ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _times(section: Section, style: Style) -> Iterator[str]:
    found = ranking.places(section.rows)
    if not found:
        yield "Nothing was timed beside a baseline in the same rounds, so no winner can be named."
    else:
        yield from _winners(found, section, style)
    for name, others in style.alike.items():
        yield f"{name} stands for {together(others)} too: they tie with it in every case, and start hidden."
    yield from _against_baseline(section)
    unranked = section.ok[section.ok["time_ms"].notna() & ~section.ok["comparable"]]
    if len(unranked):
        names = together(unique(unranked["implementation"]))
        yield f"Not ranked (*), because they do less than the baseline (fewer gradients): {names}."
    yield from _noise(section.ok, section.baseline)
    yield from _cautions(section.ok)


def _winners(found: Sequence[Place], section: Section, style: Style) -> Iterator[str]:
    """One sentence for each set of winners; implementations that another stands for count as that one."""
    stands = {other: name for name, others in style.alike.items() for other in others}
    by_winners: dict[tuple[str, ...], list[Place]] = {}
    for place in found:
        winners = {stands.get(name, name) for name in (place.best, *place.ties)}
        by_winners.setdefault(tuple(sorted(winners, key=list(style.slots).index)), []).append(place)
    if len(by_winners) > MANY:
        yield _mixed(by_winners, len(found))
        return
    for names, won in sorted(by_winners.items(), key=lambda one: -len(one[1])):
        where = _where([(place.shape, place.tokens) for place in won], section)
        speed = _span([place.speedup for place in won], "{:.2f}")
        against = f"{speed} times the speed of {section.baseline}"
        if names == (section.baseline,):
            yield f"Nothing is faster than {section.baseline}, the baseline, at {where}."
            continue
        if len(names) > 1:
            verb = "tie for the first place"
            sentence = f"{together(names)} {verb} at {where}"
            sentence += f", at {against}" if section.baseline not in names else ""
        else:
            sentence = f"{names[0]} is the fastest at {where}: {against}"
        ahead = [place for place in won if place.runner_up]
        if ahead:
            following = together(list(dict.fromkeys(stands.get(p.runner_up, p.runner_up) for p in ahead)), "or")
            longer = [100 * (1 / (1 - place.lead) - 1) for place in ahead]
            sentence += f"; the next, {following}, takes {_span(longer, '{:.1f}')}% longer"
        yield f"{sentence}."


def _mixed(by_winners: Mapping[tuple[str, ...], Sequence[Place]], cases: int) -> str:
    """One sentence where the winners change too often to list: how often each is first."""
    first: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    for names, won in by_winners.items():
        first.update({name: len(won) for name in names})
        alone.update({names[0]: len(won)} if len(names) == 1 else {})
    counts = [f"{name} in {count} (alone in {alone[name]})" for name, count in first.most_common()]
    return f"The winner changes from case to case; of {cases}, first are {together(counts)}; the map below names them."


def _against_baseline(section: Section) -> Iterator[str]:
    """Who is slower than the baseline, and who cannot be told from it."""
    rows = ranking.ranked(section.rows)
    rows = rows[rows["implementation"] != rows["baseline"]]
    slower, ties = [], []
    for (name,), mine in groups(rows, "implementation"):
        behind = mine[_verdicts(mine) == "slower"]
        level = mine[_verdicts(mine) == "tie"]
        if len(behind):
            much = _span(behind["ratio"], "{:.2f}")
            slower.append(f"{name} ({_where(_cases(behind), section)}: {much} times the time)")
        if len(level):
            ties.append(f"{name} ({_where(_cases(level), section)})")
    if slower:
        yield f"Slower than {section.baseline}: {'; '.join(slower)}."
    if ties:
        yield f"Not to be told from {section.baseline}: {'; '.join(ties)}."


def _verdicts(rows: pd.DataFrame) -> pd.Series:
    """The rows' verdicts; of rows older than that column, what their intervals say."""
    by_interval = pd.Series("tie", index=rows.index).mask(rows["ratio_high"] < 1, "faster")
    by_interval = by_interval.mask(rows["ratio_low"] > 1, "slower")
    return rows["verdict"].where(rows["verdict"] != "", by_interval)


def _noise(rows: pd.DataFrame, baseline: str) -> Iterator[str]:
    pairs = rows.dropna(subset="aa_low")
    if len(pairs):
        most = max((pairs["aa_low"] - 1).abs().max(), (pairs["aa_high"] - 1).abs().max())
        yield (
            f"Noise: {baseline} against itself in the same rounds stays within {most:.2%} of 1, interval included; "
            "what is no further apart than that, case by case, is a tie."
        )
    elif rows["ratio_low"].notna().any():
        yield "These rows carry no A/A pair (an older version wrote them): ties are judged by the intervals alone."


def _cautions(rows: pd.DataFrame) -> Iterator[str]:
    """What spoils the figures."""
    short = rows[rows["stopped_by"] == "budget"]
    if len(short):
        where = tokens_text(short["tokens"])
        yield f"The budget was spent before every ratio was known to within 0.5%: {where}."
    throttled = rows[rows["throttle"] != ""]
    if len(throttled):
        what = together(list(dict.fromkeys(" ".join(throttled["throttle"]).split())))
        most = throttled["throttled_share"].max()
        yield f"Clocks were held down by {what}, in up to {most:.0%} of the rounds: {tokens_text(throttled['tokens'])}."
    crowded = rows[rows["other_processes"].fillna(0) > 0]
    if len(crowded):
        yield f"Another process used the GPU: {tokens_text(crowded['tokens'])}."
    behind = rows[rows["queue_filled"] < 0.95]
    if len(behind):
        names = together(unique(behind["implementation"]))
        yield f"Waiting for the host may be in the times of {names} at {tokens_text(behind['tokens'])} (queue_filled)."
    spread = several_gpus(
        (row["host"], None if pd.isna(row["gpu_index"]) else row["gpu_index"], row["gpu_uuid"]) for row in dicts(rows)
    )
    if spread:
        yield spread
    yield from dict.fromkeys(note for note in rows["gpu_note"] if note)


def _memory(section: Section, style: Style) -> Iterator[str]:
    del style
    measured = section.ok.dropna(subset="peak_bytes")
    if measured.empty:
        yield "No memory could be measured."
        return
    gradients = measured["gradients"].map(lambda text: len(text.split()))
    most = measured[gradients == gradients.max()]
    for (shape,), rows in groups(most, "shape"):
        largest = rows[rows["tokens"] == rows["tokens"].max()].sort_values("peak_bytes", kind="stable")
        first, last = largest.iloc[0], largest.iloc[-1]
        at = f"{shape} at {tokens_text([first['tokens']])}"
        if last["peak_bytes"] <= 1.01 * first["peak_bytes"]:
            yield f"{at}: all peaks are within 1% of {_mebibytes(first['peak_bytes'])}."
            continue
        yield (
            f"{at}: {first['implementation']} has the lowest peak, {_mebibytes(first['peak_bytes'])}; "
            f"{last['implementation']} the highest, {_mebibytes(last['peak_bytes'])}."
        )
    less = unique(measured.loc[gradients < gradients.max(), "implementation"])
    if less:
        yield f"Left out of that, because they yield fewer gradients and need less for it: {together(less)}."


def _mebibytes(value: float) -> str:
    return f"{value / 2**20:,.0f} MiB" if value >= 100 * 2**20 else f"{value / 2**20:.3g} MiB"


def _errors(section: Section, style: Style) -> Iterator[str]:
    del style
    checked = section.rows[section.rows["status"].isin(["ok", "incorrect"])]
    wrong = checked[checked["status"] == "incorrect"]
    if checked.empty:
        yield "Nothing could be checked."
        return
    right = len(checked) - len(wrong)
    sentence = f"{right} of {len(checked)} checked rows are right"
    worst = checked[checked["status"] == "ok"].dropna(subset="error_ratio")
    if len(worst):
        most = max(dicts(worst), key=lambda row: row["error_ratio"])
        sentence += (
            f"; the nearest to the limit is {most['implementation']} ({most['shape']}, {most['dtype']}, "
            f"{tokens_text([most['tokens']])}), with {most['error_ratio']:.0%} of what is allowed"
        )
    yield f"{sentence}."
    if len(wrong):
        yield f"Incorrect: {together(list(dict.fromkeys(wrong['implementation'])))}."


def _absent(section: Section) -> Iterator[str]:
    counts = section.rows["status"].value_counts()
    named = {"incorrect": "incorrect", "error": "failed", "skipped": "skipped"}
    parts = [f"{counts[status]} {text}" for status, text in named.items() if counts.get(status)]
    if parts:
        yield f"Without figures: {together(parts)}, of {len(section.rows)} rows; the reasons are below."


def _cases(rows: pd.DataFrame) -> list[Case]:
    return [(str(shape), int(tokens)) for shape, tokens in zip(rows["shape"], rows["tokens"], strict=True)]


def _where(cases: Sequence[Case], section: Section) -> str:
    """Token counts, shapes or both, whichever tell cases of the section apart."""
    every = set(_cases(ranking.ranked(section.rows)))
    if len(every) > 1 and set(cases) >= every:
        return "every case" if len({shape for shape, _ in every}) > 1 else "every token count"
    by_shape: dict[str, list[int]] = {}
    for shape, count in cases:
        by_shape.setdefault(shape, []).append(count)
    if len(section.shapes) == 1:
        return tokens_text(count for _, count in cases)
    if len({count for _, count in every}) == 1:
        return together(list(by_shape))
    if len(by_shape) > SEVERAL:
        return f"{len(cases)} of {len(every)} cases"
    return together([f"{shape} ({tokens_text(counts)})" for shape, counts in by_shape.items()])


def _span(values: Iterable[float], form: str) -> str:
    """'1.16 to 1.22', or one figure where both ends read the same."""
    found = list(values)
    low, high = form.format(min(found)), form.format(max(found))
    return low if low == high else f"{low} to {high}"
