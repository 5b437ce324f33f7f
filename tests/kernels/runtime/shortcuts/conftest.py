"""A kernel that is launched by nobody: plans and series are tested with it, the door open."""

from collections.abc import Iterator

import pytest
from replayed import StandIn

from swiglu_kernels.runtime.shortcuts import door, plan


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setattr(door, "_shut", False)
    plan.forget()
    yield StandIn()
    plan.forget()
