"""What a contender's process tells its parent. It comes as JSON and is checked: the sender may be anything."""

from __future__ import annotations

from typing import Annotated, Literal, Self

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from swiglu_bench.measure.clock import Sample

MOST_REASON = 2000
Text = Annotated[str, Field(max_length=MOST_REASON)]
Duration = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Malformed(ValueError):
    """A report that is none: one phrase."""


class Report(BaseModel):
    """The base of all: nothing more and nothing less than its fields, in their types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def checked(cls, data: object) -> Self:
        """The report in what a process sent; raises Malformed."""
        try:
            return cls.model_validate(data)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the message"
            raise Malformed(f"its process sent a malformed report ({place}: {first['msg']})") from None


class FaultReport(Report):
    """Why a tensor's values do not count."""

    check: Text
    reason: Text


class CallReport(Report):
    """One untimed call: which results lie in the letterbox, and what is wrong with the others."""

    delivered: list[Text]
    faults: dict[Text, FaultReport]
    """By the name of a result."""
    conduct: dict[Text, Text]
    """By the name of a check: faults that belong to no result."""
    operands: list[Text] | None = None
    """Names of the operands whose codes and scales lie in their letterboxes; None where it hands over none."""


class SampleReport(Report):
    """One timed call."""

    ms: Duration
    host_us: Duration
    queue_us: Duration
    queue_filled: bool
    delivered: list[Text]
    faults: dict[Text, FaultReport]

    def sample(self) -> Sample:
        """Its times, without the call's result."""
        return Sample(self.ms, self.host_us, self.queue_us, self.queue_filled, None)


class BuildReport(Report):
    """An implementation that was built."""

    gradients: list[Text]
    """Names of the gradients that it yields."""


class MemoryReport(Report):
    """Bytes above inputs and weights."""

    saved_bytes: int
    peak_bytes: int
    kept_bytes: int


class UsageReport(Report):
    """The scenarios of one implementation: results that lie in the letterbox, and those that ended with an error."""

    delivered: list[Text]
    raised: dict[Text, Text]
    """By scenario."""


class CheckReport(Report):
    """One check of the contract."""

    verdict: Literal["pass", "fail", "unsupported", "not run"]
    reason: Text
