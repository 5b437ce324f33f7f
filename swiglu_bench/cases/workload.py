"""A recorded workload: which token counts a server or a training saw, and how often. From JSON or CSV; no torch."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import Field

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.shapes import Size

Workload = Mapping[int, float]
"""How often each token count was seen, by token count, ascending."""

MOST_COUNTS = 32
"""More token counts than these are represented by as many."""
EXPECTED = 'give tokens and weights: JSON such as {"128": 900, "1": 20}, or CSV with the columns tokens and weight'


class Line(pydantic.BaseModel, extra="forbid"):
    """One call, or `weight` of them, with so many tokens."""

    tokens: Size
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


def load_workload(file: Path) -> Workload:
    """Read a workload; a line without a weight is one call, and lines with the same token count add up.

    JSON is an object of weights by token count, or a list of token counts or of objects with `tokens` and `weight`; CSV
    has the columns `tokens` and, if it likes, `weight`. Raises BadInput, which names the line, for anything else.
    """
    try:
        text = file.read_text(encoding="utf-8")
        lines = _from_json(text) if file.suffix == ".json" else list(csv.DictReader(text.splitlines()))
    except OSError as error:
        raise BadInput(f"--workload: {file} cannot be read: {error.strerror}; {EXPECTED}.") from None
    except (ValueError, csv.Error) as error:
        raise BadInput(f"--workload: {file} cannot be read: {error}; {EXPECTED}.") from None
    found: dict[int, float] = {}
    for number, given in enumerate(lines, start=1):
        try:
            line = Line.model_validate(given)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "entry"
            raise BadInput(f"--workload: {file}, entry {number}: {where}: {first['msg']}; {EXPECTED}.") from None
        found[line.tokens] = found.get(line.tokens, 0.0) + line.weight
    if not found:
        raise BadInput(f"--workload: {file} has no token counts; {EXPECTED}.")
    return _reduced(dict(sorted(found.items())))


def _from_json(text: str) -> list[Any]:
    data = json.loads(text)
    if isinstance(data, dict):
        return [{"tokens": tokens, "weight": weight} for tokens, weight in data.items()]
    if not isinstance(data, list):
        raise ValueError("it holds neither an object nor a list")
    return [{"tokens": one} if isinstance(one, int) else one for one in data]


def _reduced(workload: dict[int, float]) -> Workload:
    """At most MOST_COUNTS token counts: of each range of similar ones, the one seen most often stands for all."""
    if len(workload) <= MOST_COUNTS:
        return workload
    ranges: dict[int, list[int]] = {}
    fewest, most = min(workload), max(workload)
    for tokens in workload:
        place = math.log(tokens / fewest) / math.log(most / fewest)
        ranges.setdefault(min(int(MOST_COUNTS * place), MOST_COUNTS - 1), []).append(tokens)
    return {
        max(counts, key=lambda tokens: (workload[tokens], tokens)): sum(workload[tokens] for tokens in counts)
        for counts in ranges.values()
    }
