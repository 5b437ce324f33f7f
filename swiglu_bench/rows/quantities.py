"""How figures read as text, the same in tables, logs, documents and reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MIB = 2**20


def milliseconds(time_ms: float) -> str:
    """A time with four significant figures, in the unit that reads best."""
    if time_ms < 1:
        return f"{time_ms * 1e3:.4g} us"
    return f"{time_ms:.4g} ms" if time_ms < 1e4 else f"{time_ms / 1e3:.4g} s"


def microjoules(energy_uj: float) -> str:
    """An energy with three significant figures, in the unit that reads best."""
    return f"{energy_uj:.3g} uJ" if energy_uj < 1e3 else f"{energy_uj / 1e3:.3g} mJ"


def mebibytes(size_bytes: float | None) -> str:
    """A size in MiB, without the unit; a dash for None."""
    if size_bytes is None:
        return "-"
    mib = size_bytes / MIB
    return f"{mib:.3f}" if mib < 1 else f"{mib:,.1f}"


def size(size_bytes: float) -> str:
    """A size in GiB, or below one in MiB, with the unit."""
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes / MIB:.1f} MiB"


def plus_minus(ratio: float, low: float, high: float) -> str:
    """A ratio with half of its interval, '0.800 ± 0.010', or with both ends where these are far or not alike."""
    below, above = ratio - low, high - ratio
    if max(below, above) > 0.01 and (max(below, above) > 2 * min(below, above) or high - low > 0.2 * ratio):
        return f"{ratio:.3f} ({low:.3f} to {high:.3f})" if high < 100 else f"{ratio:.3f} ({low:.3g} to {high:.3g})"
    return f"{ratio:.3f} ± {(high - low) / 2:.3f}"


def token_text(count: int) -> str:
    """A token count as the command line takes it: 8k for 8192."""
    return f"{count // 1024}k" if count >= 1024 and count % 1024 == 0 else str(count)


def tokens_text(counts: Iterable[int]) -> str:
    """'1, 16 and 1k tokens'."""
    texts = [token_text(count) for count in sorted(set(counts))]
    return f"{together(texts)} token{'' if texts == ['1'] else 's'}"


def together(names: Sequence[str], between: str = "and") -> str:
    """'a, b and c'."""
    return f" {between} ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
