"""How errors are reported: bad input in one sentence, near matches for a misspelt name, an exception in one line."""

import difflib
import fnmatch
from collections.abc import Iterable, Sequence

MOST_CHARACTERS = 300
"""Most characters of an exception's text in a row or a message."""


class BadInput(ValueError):
    """The user's input is wrong; the message is one sentence that says what is wrong and what would be right."""


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """'did you mean a or b?' where a known name is similar, else the list of known names."""
    near = difflib.get_close_matches(word, dict.fromkeys(known), n=3, cutoff=0.6)
    best = max((_likeness(word, name) for name in near), default=0.0)
    near = [name for name in near if best - _likeness(word, name) < 0.1]
    near += [name for name in dict.fromkeys(known) if word and name.startswith(word) and name not in near]
    near = near[:3]
    return f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}."


def one_of(option: str, value: str, *known: str) -> str:
    """The value of an option; raises BadInput for one that it does not have."""
    if value not in known:
        near = did_you_mean(value, known)
        raise BadInput(f"{option}: {value!r} is not one of {', '.join(known)}{'; ' + near if 'mean' in near else '.'}")
    return value


def _likeness(word: str, name: str) -> float:
    return difflib.SequenceMatcher(None, name, word).ratio()


def one_line(error: BaseException) -> str:
    """An exception as part of a sentence: its type and its text."""
    try:
        text = " ".join(str(error).split())[:MOST_CHARACTERS].rstrip(".: ")
    except Exception:  # a contender's own exception
        text = "its text cannot be read"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def matching(known: Sequence[str], patterns: Iterable[str], complaint: str) -> set[str]:
    """Those of the known names that match any pattern, globs included; raises BadInput for a pattern without any."""
    found: set[str] = set()
    for pattern in patterns:
        if not (names := fnmatch.filter(known, pattern)):
            raise BadInput(f"{complaint.format(pattern)}; {did_you_mean(pattern, known)}")
        found.update(names)
    return found
