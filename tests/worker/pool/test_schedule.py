import dataclasses

from gpus import a_gpu
from specimens import small_case

from swiglu_bench.cases.cases import Mode, Scope
from swiglu_bench.worker.pool.place import Place
from swiglu_bench.worker.pool.schedule import Schedule, expected_cost

ONE, OTHER = Place(0, a_gpu(0)), Place(1, a_gpu(1))


def test_the_longest_comes_first() -> None:
    cases = [small_case(tokens=tokens) for tokens in (3, 1000, 7, 100)]
    schedule = Schedule(cases)
    assert [schedule.take(ONE, [OTHER]) for _ in range(5)] == [1, 3, 2, 0, None]


def test_cost_grows_with_work_of_either_kind() -> None:
    forward, step = small_case(mode=Mode.FORWARD), small_case(mode=Mode.STEP)
    assert expected_cost(forward) < expected_cost(step)
    gate = small_case(scope=Scope.ACTIVATION)
    assert expected_cost(gate) < expected_cost(dataclasses.replace(gate, tokens=1000)), "bytes count, too"


def test_a_case_whose_place_was_lost_comes_again_elsewhere_and_first() -> None:
    schedule = Schedule([small_case(tokens=tokens) for tokens in (9, 5)])
    assert schedule.take(ONE, [OTHER]) == 0
    assert schedule.give_back(0, ONE, "it was killed") is None
    again = Place(2, a_gpu(0))  # another process on the same GPU
    assert schedule.take(again, [OTHER]) == 1
    assert schedule.take(again, [OTHER]) is None, "left to the other place, which is busy"
    assert schedule.take(OTHER, [again]) == 0


def test_where_there_is_no_elsewhere_it_comes_again_there() -> None:
    schedule = Schedule([small_case()])
    schedule.take(ONE, [])
    schedule.give_back(0, ONE, "it was killed")
    again = Place(2, a_gpu(0))
    assert schedule.take(again, []) == 0


def test_the_second_loss_is_the_last() -> None:
    schedule = Schedule([small_case()])
    schedule.take(ONE, [OTHER])
    schedule.give_back(0, ONE, "killed")
    schedule.take(OTHER, [])
    reason = schedule.give_back(0, OTHER, "its node died")
    assert reason == "Its process ended 2 times: a GPU 0 was lost: killed; then a GPU 1 was lost: its node died."
    assert schedule.take(ONE, []) is None
