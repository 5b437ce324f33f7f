"""A section in sentences: who wins where and by how much, who ties, who is slower, and what spoils the figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

from swiglu_bench.rows.figures import mebibytes, together, tokens_text
from swiglu_bench.rows.record import Record, Status, grouped, unique
from swiglu_bench.show.charts.style import Style
from swiglu_bench.show.report import ranking
from swiglu_bench.show.report.ranking import Place
from swiglu_bench.show.report.sections import Section
from swiglu_bench.show.writers.cautions import cautions

Rows = Sequence[Record]
SEVERAL = 3
"""Cases of more shapes than these are counted instead of listed."""
NAMED = 3
"""More winners than these are not named in one sentence about many cases."""
MANY = 6
"""More sentences about winners than these are not read."""
WAITS = 0.95
"""Where the host was ahead of the GPU in fewer of the rounds than this, a time may hold waiting for the host."""
TELLS_NOTHING = 0.5
"""Noise beyond which a machine was too busy for a percentage to make sense."""


def sentences(section: Section, style: Style) -> list[str]:
    """The most important first."""
    tell = {"time": _times, "memory": _memory, "verify": _errors}[section.kind]
    return [*tell(section, style), *remarks(section)]


def remarks(section: Section) -> list[str]:
    """What spoils the figures, and what has none."""
    return [*(_spoiled(section) if section.kind == "time" else ()), *_absent(section.rows)]


def headline(section: Section, style: Style) -> str:
    """What the section says in short: who wins where; of memory and errors the first sentence."""
    found = ranking.places(section.rows) if section.kind == "time" else []
    return " ".join(_winners(found, section, style)) if found else sentences(section, style)[0]


def overall(places: Sequence[Place]) -> str:
    """In how many cases the baseline is beaten, by how much, and by whom most often."""
    ahead = [place for place in places if place.baseline not in place.first]
    baselines = together(unique(place.baseline for place in places), "or")
    cases = f"{len(places)} cases" if len(places) > 1 else "one case"
    if not ahead:
        return f"Nothing is faster than {baselines}, the baseline, in {cases}."
    counts = Counter(name for place in ahead for name in place.first).most_common(NAMED)
    most = together([f"{name} ({count})" for name, count in counts])
    where = (
        f"all {cases}" if len(ahead) == len(places) > 1 else cases if len(places) == 1 else f"{len(ahead)} of {cases}"
    )
    return (
        f"In {where} an implementation is faster than {baselines}, {_span((one.speedup for one in ahead), '{:.2f}')} "
        f"times as fast; first most often, ties included: {most}."
    )


def _times(section: Section, style: Style) -> Iterator[str]:
    found = ranking.places(section.rows)
    if not found:
        yield "Nothing was timed beside a baseline in the same rounds, so no winner can be named."
    yield from _winners(found, section, style)
    for name, others in style.alike.items():
        yield f"{name} stands for {together(others)} too: they tie with it in every case, and are hidden at first."
    yield from _against_baseline(section)
    unranked = _names(row for row in section.timed if not row.comparable)
    if unranked:
        yield f"Not ranked (*), because they do less than the baseline (fewer gradients): {unranked}."


def _spoiled(section: Section) -> Iterator[str]:
    yield from _noise(section)
    yield from (text for text, _ in cautions(section.timed))
    waiting = [row for row in section.ok if row.queue_filled is not None and row.queue_filled < WAITS]
    if waiting:
        yield f"Waiting for the host may be in the times of {_names(waiting)} at {_tokens(waiting)} (queue_filled)."


def _winners(found: Sequence[Place], section: Section, style: Style) -> Iterator[str]:
    """One sentence for each set of winners; implementations that another stands for count as that one."""
    by_winners = grouped(found, lambda place: style.standing(place.first))
    if len(by_winners) > MANY:
        yield _mixed(by_winners, len(found))
        return
    for names, won in sorted(by_winners.items(), key=lambda one: -len(one[1])):
        where = _where([(place.shape, place.tokens) for place in won], section)
        against = f"{_span((place.speedup for place in won), '{:.2f}')} times the speed of {section.baseline}"
        if names == (section.baseline,):
            yield f"Nothing is faster than {section.baseline}, the baseline, at {where}."
            continue
        if len(names) > 1:
            sentence = f"{together(names)} tie for the first place at {where}"
            sentence += f", at {against}" if section.baseline not in names else ""
        else:
            sentence = f"{names[0]} is the fastest at {where}: {against}"
        ahead = [place for place in won if place.runner_up]
        if ahead:
            following = together(unique(name for place in ahead for name in style.standing([place.runner_up])), "or")
            longer = _span((100 * place.longer for place in ahead), "{:.1f}")
            sentence += f"; the next, {following}, takes {longer}% longer"
        yield f"{sentence}."


def _mixed(by_winners: Mapping[tuple[str, ...], Sequence[Place]], cases: int) -> str:
    """One sentence where the winners change too often to list: how often each is first."""
    first: Counter[str] = Counter()
    for names, won in by_winners.items():
        first.update({name: len(won) for name in names})
    counts = [f"{name} in {count} (alone in {len(by_winners.get((name,), ()))})" for name, count in first.most_common()]
    return f"The winner changes from case to case; of {cases}, first are {together(counts)}."


def _against_baseline(section: Section) -> Iterator[str]:
    """Who is slower than the baseline, and who cannot be told from it."""
    able = [row for row in section.rows if row.interval and row.comparable and row.implementation != row.baseline]
    slower, ties = [], []
    for name, own in grouped(able, attrgetter("implementation")).items():
        behind = [row for row in own if ranking.verdict(row) == "slower"]
        level = [row for row in own if ranking.verdict(row) == "tie"]
        if behind:
            much = _span((row.ratio or 0.0 for row in behind), "{:.2f}")
            slower.append(f"{name} ({_where(_cases(behind), section)}: {much} times the time)")
        if level:
            ties.append(f"{name} ({_where(_cases(level), section)})")
    if slower:
        yield f"Slower than {section.baseline}: {'; '.join(slower)}."
    if ties:
        yield f"Not distinguishable from {section.baseline}: {'; '.join(ties)}."


def _noise(section: Section) -> Iterator[str]:
    noise = [row.noise for row in section.ok if row.noise is not None]
    if noise and max(noise) > TELLS_NOTHING:
        yield (
            f"Noise: in at least one case {section.baseline} cannot be told from itself at {1 + max(noise):.2g} times "
            "the time, so busy was the machine; smaller differences there are ties."
        )
    elif noise:
        yield (
            f"Noise: {section.baseline} against itself in the same rounds stays within {max(noise):.2%} of 1, interval "
            "included; ratios no further apart than that, case by case, are a tie."
        )
    elif any(row.interval for row in section.ok):
        yield "These rows carry no A/A pair (an older version wrote them): ties are judged by the intervals alone."


def _memory(section: Section, style: Style) -> Iterator[str]:
    del style
    measured = [row for row in section.ok if row.peak_bytes is not None]
    if not measured:
        yield "No memory could be measured."
        return
    by_gradients = grouped(measured, lambda row: len(row.gradients.split()))
    whole = by_gradients.pop(max(by_gradients))
    for shape, rows in grouped(whole, attrgetter("shape")).items():
        tokens = max(row.tokens for row in rows)
        largest = sorted((row for row in rows if row.tokens == tokens), key=lambda row: row.peak_bytes or 0)
        first, last = largest[0], largest[-1]
        low, high = (f"{mebibytes(row.peak_bytes)} MiB" for row in (first, last))
        at = f"{shape} at {tokens_text([tokens])}"
        if (last.peak_bytes or 0) <= 1.01 * (first.peak_bytes or 0):
            yield f"{at}: all peaks are within 1% of {low}."
        else:
            yield f"{at}: {first.implementation} has the lowest peak, {low}; {last.implementation} the highest, {high}."
    if by_gradients:
        less = _names(row for rows in by_gradients.values() for row in rows)
        yield f"Omitted there, because they compute fewer gradients and therefore need less: {less}."


def _errors(section: Section, style: Style) -> Iterator[str]:
    del style
    wrong = [row for row in section.rows if row.status is Status.INCORRECT]
    checked = len(section.ok) + len(wrong)
    if not checked:
        yield "Nothing could be checked."
        return
    sentence = f"{len(section.ok)} of {checked} checked rows are right"
    known = [row for row in section.ok if row.error_ratio is not None]
    if known:
        most = max(known, key=lambda row: row.error_ratio or 0.0)
        sentence += (
            f"; the nearest to the limit is {most.implementation} ({most.shape}, {most.dtype}, "
            f"{tokens_text([most.tokens])}), with {most.error_ratio:.0%} of what is allowed"
        )
    yield f"{sentence}."
    if wrong:
        yield f"Incorrect: {_names(wrong)}."


def _absent(rows: Rows) -> Iterator[str]:
    counts = Counter(row.status for row in rows)
    named = {
        Status.INCORRECT: "incorrect",
        Status.ERROR: "failed",
        Status.UNSETTLED: "unsettled",
        Status.SKIPPED: "skipped",
    }
    parts = [f"{counts[status]} {text}" for status, text in named.items() if counts[status]]
    if parts:
        yield f"Without figures: {together(parts)}, of {len(rows)} rows; the reasons are below."


def _names(rows: Iterable[Record]) -> str:
    return together(unique(row.implementation for row in rows))


def _tokens(rows: Rows) -> str:
    return tokens_text(row.tokens for row in rows)


def _cases(rows: Iterable[Record]) -> list[tuple[str, int]]:
    return [(row.shape, row.tokens) for row in rows]


def _where(cases: Sequence[tuple[str, int]], section: Section) -> str:
    """Token counts, shapes or both, whichever tell cases of the section apart."""
    every = set(_cases(ranking.ranked(section.rows)))
    if len(every) > 1 and set(cases) >= every:
        return "every case" if len({shape for shape, _ in every}) > 1 else "every token count"
    if len({row.shape for row in section.rows}) == 1:
        return tokens_text(count for _, count in cases)
    by_shape = grouped(cases, lambda case: case[0])
    if len({count for _, count in every}) == 1:
        return together(list(by_shape))
    if len(by_shape) > SEVERAL:
        return f"{len(cases)} of {len(every)} cases"
    return together([f"{shape} ({tokens_text(count for _, count in own)})" for shape, own in by_shape.items()])


def _span(values: Iterable[float], form: str) -> str:
    """'1.16 to 1.22', or one figure where both ends read the same."""
    found = list(values)
    low, high = form.format(min(found)), form.format(max(found))
    return low if low == high else f"{low} to {high}"
