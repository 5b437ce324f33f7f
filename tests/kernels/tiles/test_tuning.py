"""The file of tuned choices and its look-up before a launch."""

import contextlib
import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tuned import ENTRY, HERE, TILE

from swiglu_kernels import swiglu_glu
from swiglu_kernels.ops.glu import hopper_forward, hopper_row, hopper_transposed
from swiglu_kernels.ops.glu.choice import forward_by_hand
from swiglu_kernels.ops.glu.portable_backward import input_grad_launch, weight_grad_launch
from swiglu_kernels.ops.glu.portable_forward import forward_launch, recompute_launch
from swiglu_kernels.ops.mlp.portable_mlp import down_backward_launch, down_weight_grad_launch
from swiglu_kernels.runtime import sources
from swiglu_kernels.runtime.backend import describing_for
from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.tiles import tuning
from swiglu_kernels.tiles.candidates import Choice, TileProblem
from swiglu_kernels.tiles.rules import Tile
from swiglu_kernels.tiles.tuning import TunedEntry

CPU = torch.device("cpu")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file's place, on a machine that things are tuned for."""
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "there" / "tuning.json"))
    monkeypatch.setattr(tuning, "machine_of", lambda device: HERE)
    tuning.forget()
    yield tmp_path / "there" / "tuning.json"
    tuning.forget()


def keep(*entries: TunedEntry) -> None:
    tuning.write(entries)
    tuning.forget()


def found(kernel: str = "forward", tokens: int = 8, hidden: int = 32, intermediate: int = 64) -> Choice | None:
    return tuning.lookup(kernel, torch.empty(1, dtype=torch.float16), tokens, hidden, intermediate)


# Where it is


def test_the_place_of_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(tuning.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning.path() == tmp_path / "swiglu-kernels" / "tuning.json"
    monkeypatch.setenv(tuning.VARIABLE, "elsewhere.json")
    assert tuning.path() == Path("elsewhere.json")
    monkeypatch.setenv(tuning.VARIABLE, "off")
    assert tuning.path() is None
    assert tuning.entries() == []
    assert tuning.digest(CPU) == ""


# What comes back


def test_a_choice_comes_back(file: Path) -> None:
    assert found() is None
    other = replace(ENTRY, kernel="recompute")
    keep(ENTRY, other)
    assert tuning.entries() == [ENTRY, other]
    assert [tokens for tokens in range(1, 20) if found(tokens=tokens) == ENTRY.choice] == [5, 6, 7, 8], "its bucket"
    assert list(file.parent.iterdir()) == [file], "nothing is left of the way it was written"


@pytest.mark.usefixtures("file")
def test_it_holds_for_nothing_else() -> None:
    others = [{"kernel": "recompute"}, {"dtype": "bfloat16"}, {"tokens": 16}, {"hidden": 48}, {"intermediate": 48}]
    for name in ("gpu", "capability", "torch", "triton", "kernels"):
        others.append({"machine": replace(HERE, **{name: "another"})})
    for changes in others:
        keep(replace(ENTRY, **changes))
        assert found() is None, changes


@pytest.mark.usefixtures("file")
def test_tiles_of_other_kernels_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(sources.PACKAGE, tmp_path / "package")
    monkeypatch.setattr(sources, "PACKAGE", tmp_path / "package")
    monkeypatch.setattr(tuning, "machine_of", lambda device: replace(HERE, kernels=sources.of_kernels()))
    sources.of_kernels.cache_clear()
    try:
        keep(replace(ENTRY, machine=tuning.machine_of(CPU)))
        assert found() == ENTRY.choice
        with (tmp_path / "package" / "hopper" / "row.py").open("a") as changed:
            changed.write("# another kernel\n")
        sources.of_kernels.cache_clear()
        tuning.forget()
        assert found() is None
    finally:
        sources.of_kernels.cache_clear()


def test_the_file_is_read_once_and_switched_off_never(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(ENTRY)
    monkeypatch.setenv(tuning.VARIABLE, "off")
    assert found() is None
    monkeypatch.setenv(tuning.VARIABLE, str(file))
    tuning.forget()
    found()
    monkeypatch.setattr(tuning.kept, "read_if_sound", lambda *_: pytest.fail("read again"))
    file.unlink()
    assert (found(), found("recompute")) == (ENTRY.choice, None)


@pytest.mark.usefixtures("file")
def test_the_digest_names_what_holds_here() -> None:
    assert tuning.digest(CPU) == ""
    keep(ENTRY)
    first = tuning.digest(CPU)
    keep(replace(ENTRY, at="2027-01-01T00:00:00Z"))
    assert tuning.digest(CPU) == first
    keep(replace(ENTRY, choice=Choice("portable", replace(TILE, stages=3))))
    assert tuning.digest(CPU) not in ("", first)


# Files that are not sound

PLAIN = json.loads(json.dumps(asdict(ENTRY)))


def with_entry(**changes: object) -> str:
    return json.dumps({"schema": tuning.SCHEMA, "entries": [PLAIN | changes]})


TILES = PLAIN["choice"]["tile"]
UNSOUND_ENTRIES: list[dict[str, Any]] = [
    {"kernel": "backward"}, {"kernel": []}, {"dtype": "float32"}, {"dtype": None}, {"tokens": 7}, {"hidden": "32"},
    {"hidden": True}, {"extra": 1}, {"ratio": [1.0]}, {"machine": {"gpu": "x"}}, {"choice": {"schedule": "portable"}},
    {"machine": PLAIN["machine"] | {"gpu": 3}}, {"choice": {"schedule": ["portable"], "tile": TILES}},
    *({"choice": {"schedule": "portable", "tile": TILES | wrong}} for wrong in ({"rows": 16.0}, {"rows": 24})),
]  # fmt: skip
UNSOUND = [
    "", "{", "[]", "[" * 100_000, "\x00\xff", '{"entries": []}', '{"schema": 2, "entries": []}', '{"schema": 1}',
    '{"schema": 1, "entries": 3}', '{"schema": 1, "entries": [3]}', '{"schema": 1, "entries": [{}]}',
]  # fmt: skip


@pytest.mark.parametrize("text", UNSOUND + [with_entry(**changes) for changes in UNSOUND_ENTRIES])
def test_a_file_that_is_not_sound_costs_one_warning(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text, encoding="latin-1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert found() is None
        assert found("recompute") is None
        tuning._tables.clear()
        assert found() is None
    assert len(caught) == 1
    assert "the shipped tiles are used" in str(caught[0].message)
    assert str(file) in str(caught[0].message)


def test_a_choice_of_another_machine_is_not_judged(file: Path) -> None:
    keep(replace(ENTRY, machine=replace(HERE, gpu="x"), choice=Choice("portable", Tile(256, 256, 256, 4, 6))), ENTRY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found() == ENTRY.choice


# What it changes


def matrix(*shape: int) -> torch.Tensor:
    return torch.randn(shape).half()


def tile_of(launch: Launch) -> tuple[int, int]:
    return launch.num_warps, launch.num_stages


M, K, N = 8, 32, 64
X, Z, W, W_DOWN = (M, K), (M, N), (N, K), (K, N)


def launching(describe: Callable[..., Launch], *shapes: Any) -> Callable[[], Launch]:
    """A launch of matrices of these shapes; None stays, and a list of shapes is a tuple of matrices."""

    def made(shape: Any) -> Any:
        return tuple(map(made, shape)) if isinstance(shape, list) else None if shape is None else matrix(*shape)

    return lambda: describe(*map(made, shapes))


LAUNCHES = {
    "forward": launching(forward_launch, X, W, W, Z, None),
    "forward-preact": launching(forward_launch, X, W, W, Z, [Z, Z]),
    "recompute": launching(recompute_launch, Z, X, W, W, [Z, Z]),
    "input-grad": launching(input_grad_launch, None, Z, Z, W, W, X),
    "input-grad-fused": launching(input_grad_launch, Z, Z, Z, W, W, X),
    "weight-grad": launching(weight_grad_launch, None, Z, Z, X, W, W),
    "weight-grad-fused": launching(weight_grad_launch, Z, Z, Z, X, W, W),
    "mlp-hidden-grad": launching(down_backward_launch, X, W_DOWN, [Z, Z], Z, Z, None),
    "mlp-weight-grad": launching(down_weight_grad_launch, X, Z, W_DOWN),
}


@pytest.mark.parametrize("kernel", LAUNCHES)
@pytest.mark.usefixtures("file")
def test_each_launch_asks_for_its_own_kernel(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: tile_of(describe()) for name, describe in LAUNCHES.items()}
    tuned = Choice("portable", Tile(16, 32, 64, warps=8, stages=6))
    monkeypatch.setitem(tuning._tables, CPU, {(kernel, torch.float16, M, K, N): tuned})
    after = {name: tile_of(describe()) for name, describe in LAUNCHES.items()}
    assert {name for name in LAUNCHES if after[name] != before[name]} == {kernel}
    assert after[kernel] == (8, 6)


@pytest.mark.usefixtures("file")
def test_a_tuned_tile_computes_the_same() -> None:
    x, w_gate, w_up = matrix(M, K), matrix(N, K), matrix(N, K)
    expected = swiglu_glu(x, w_gate, w_up)
    keep(ENTRY)
    assert found() == ENTRY.choice
    assert torch.equal(swiglu_glu(x, w_gate, w_up), expected)


@pytest.mark.usefixtures("file")
def test_tensors_that_are_not_aligned_keep_the_shipped_tile() -> None:
    given = matrix(M, 33)[:, 1:], matrix(N, K), matrix(N, K), matrix(M, N), None
    before = tile_of(forward_launch(*given))
    keep(ENTRY)
    assert tile_of(forward_launch(*given)) == before


@pytest.fixture
def hopper_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launches are the names of their modules, with the tile."""
    monkeypatch.setattr(hopper_forward, "why_not", lambda *arguments: None)
    for module in (hopper_forward, hopper_transposed, hopper_row):
        name = module.__name__
        monkeypatch.setattr(module, "forward_launch", lambda *arguments, name=name: (name, arguments[-1]))


@pytest.mark.usefixtures("hopper_takes_all")
def test_which_forward_runs_is_a_tuned_choice_too() -> None:
    def launch(tokens: int, **options: Any) -> Any:
        with describing_for((9, 0)):
            return forward_launch(matrix(tokens, K), matrix(N, K), matrix(N, K), matrix(tokens, N), None, **options)

    row, wide = hopper_row.tile_for(N, 132), replace(hopper_forward.TILE, stages=4, group=8)
    assert isinstance(launch(16), Launch)
    assert launch(65) == launch(128) == (hopper_row.__name__, row)
    for tokens in (129, 512, 8192):
        choice = forward_by_hand(TileProblem(tokens, K, N, torch.float16, (9, 0)), False)
        module = {"ping-pong": hopper_forward, "transposed": hopper_transposed}[choice.schedule]
        assert launch(tokens) == (module.__name__, choice.tile)
    few = TileProblem(8, K, N, torch.float16, (9, 0))
    with tuning.forced(CPU, "forward", few, Choice("ping-pong", wide)):
        assert launch(8) == (hopper_forward.__name__, wide)
        assert isinstance(launch(8, biases=(matrix(N), matrix(N))), Launch), "tuned without biases"
        assert isinstance(launch(16), Launch)
    with tuning.forced(CPU, "forward", few, Choice("cooperative", row)):
        assert launch(8) == (hopper_row.__name__, row)
    with tuning.forced(CPU, "forward", replace(few, tokens=128), ENTRY.choice):
        assert tile_of(launch(100)) == (TILE.warps, TILE.stages)


def test_forced_leaves_no_trace() -> None:
    problem = TileProblem(8, 32, 64, torch.float16, None)
    before = dict(tuning._tables)

    with contextlib.suppress(KeyError), tuning.forced(CPU, "forward", problem, ENTRY.choice):
        assert found() == ENTRY.choice
        raise KeyError
    assert tuning._tables == before
