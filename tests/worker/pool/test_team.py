from collections.abc import Sequence
from typing import Any

import pytest
import torch
from gpus import a_gpu
from specimens import small_case

from swiglu_bench.cases.cases import Case
from swiglu_bench.contenders import pytorch
from swiglu_bench.rows.record import Status
from swiglu_bench.worker import policy
from swiglu_bench.worker.pool.place import Place
from swiglu_bench.worker.pool.team import Done, Lost, NoPlace, run
from swiglu_bench.worker.settings import Settings, Task

BOTH = [pytorch.eager, pytorch.eager_packed]
SETTINGS = Settings(Task.TIME, torch.device("cuda", 0), "swiglu-bench forward", "run")
CASES = [small_case(tokens=tokens) for tokens in (1, 2, 3, 4)]


class FakeTeam:
    """Does every case at once, but for what `deaths` says: (place, tokens) that end the place."""

    device = SETTINGS.device

    def __init__(self, deaths: Sequence[tuple[int, int]] = (), replaced: bool = False) -> None:
        self.places = {number: Place(number, a_gpu(number)) for number in (0, 1)}
        self.doing: dict[int, tuple[str, float]] = {}
        self.joining = False
        self._deaths = list(deaths)
        self._replaced = replaced
        self._events: list[Done | Lost] = []
        self.began: list[tuple[int, int]] = []

    def begin(self, place: int, case: Case) -> None:
        self.began.append((place, case.tokens))
        this = self.places[place].machine
        if (place, case.tokens) in self._deaths:
            del self.places[place]
            if self._replaced:
                self.places[place + 10] = Place(place + 10, this)
            self._events.append(Lost(place, "it was killed"))
        else:
            self._events.append(Done(place, [policy.blank(SETTINGS, this, case, one) for one in BOTH]))

    def wait(self, timeout_s: float) -> list[Done | Lost]:
        found, self._events = self._events, []
        return found


def rows(team: FakeTeam, told: list[tuple[float, str]], warned: list[str]) -> dict[tuple[int, str], Any]:
    found = list(run(team, CASES, BOTH, SETTINGS, lambda share, text: told.append((share, text)), warned.append))
    by_name = {(row.tokens, row.implementation): row for row in found}
    assert len(by_name) == len(found) == 8, "each row once"
    return by_name


def test_every_row_once_and_each_names_its_gpu() -> None:
    told: list[tuple[float, str]] = []
    found = rows(FakeTeam(), told, [])
    assert {row.gpu_uuid for row in found.values()} == {"GPU-0", "GPU-1"}
    for tokens in (1, 2, 3, 4):
        assert len({found[tokens, one.name].gpu_uuid for one in BOTH}) == 1
    assert told[0] == (0.0, "0/4 on 2 GPUs: small, 4 tokens")
    assert told[-1] == (2.0, "2/4 on 2 GPUs: small, 2 tokens")


def test_a_place_that_dies_costs_a_retry_elsewhere() -> None:
    warned: list[str] = []
    team = FakeTeam([(0, 4)])
    found = rows(team, [], warned)
    assert {row.status for row in found.values()} == {Status.OK}
    assert (1, 4) in team.began
    assert warned == [f"a GPU 0 was lost: it was killed; {CASES[3].label} is run once more."]


def test_what_kills_two_places_becomes_rows_with_errors() -> None:
    found = rows(FakeTeam([(0, 4), (1, 4)], replaced=True), [], [])
    errors = {row.tokens: row.reason for row in found.values() if row.status is Status.ERROR}
    assert errors == {
        4: "Its process ended 2 times: a GPU 0 was lost: it was killed; then a GPU 1 was lost: it was killed."
    }


def test_without_a_place_the_sweep_says_what_is_left() -> None:
    team, warned = FakeTeam([(0, 4), (1, 3)]), list[str]()
    with pytest.raises(
        NoPlace, match=r"^4 cases are left and no place to run them: a GPU 1 was lost: it was killed\.$"
    ):
        rows(team, [], warned)
    assert len(warned) == 2
