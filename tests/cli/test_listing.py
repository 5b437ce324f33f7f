import io
import re
from collections.abc import Iterable

import pytest
import torch
from rich.console import Console, RenderableType
from specimens import small_case

from swiglu_bench.cli import listing
from swiglu_bench.implementations import CATALOGUE
from swiglu_bench.machine.machine import describe
from swiglu_bench.spec.cases import VARIANTS, Shape
from swiglu_bench.spec.costs import needed_bytes
from swiglu_bench.spec.implementation import Step, implementation
from swiglu_bench.spec.shapes import ShapeFile, all_configs

WIDTHS = pytest.mark.parametrize("width", [60, 100, 200])


def shown(renderables: Iterable[RenderableType], width: int = 200) -> str:
    console = Console(record=True, width=width, file=io.StringIO(), color_system=None)
    for renderable in renderables:
        console.print(renderable)
    text = console.export_text()
    assert all(len(line) <= width for line in text.splitlines())
    return text


@WIDTHS
def test_every_implementation_with_availability_and_the_reason_under_the_table(width: int) -> None:
    text = shown(listing.implementations(CATALOGUE, "cpu"), width)
    used = set(re.findall(r"\bno \[(\d+)\]", text))
    explained = set(re.findall(r"^\[(\d+)\] \w", text, flags=re.MULTILINE))
    assert used == explained
    assert used
    for one in CATALOGUE:
        assert re.search(rf"^ ?{re.escape(one.name)}\b", text, flags=re.MULTILINE), one.name
    assert "Triton kernels need a GPU;" in " ".join(text.split())


def test_what_an_implementation_can_do() -> None:
    def build(problem: object) -> Step:
        return Step(lambda x: x)

    some = [
        implementation("all-round", scopes=["activation", "glu", "mlp"], description="does all")(build),
        implementation("packed", scopes=["mlp", "glu"], description="d", weight_layout="packed", trains="inputs")(
            build
        ),
        implementation("server", scopes=["glu"], description="d", trains="nothing", package="surely_not_installed")(
            build
        ),
    ]
    text = shown(listing.implementations(some, "cpu"))
    assert re.search(r"all-round +all +all +separate +yes +does all", text)
    assert re.search(r"packed +glu mlp +inputs +packed +yes", text)
    assert re.search(r"server +glu +none +separate +no \[1\]", text)
    assert "[1] The package surely_not_installed is not installed." in text


@WIDTHS
def test_every_shape_and_every_sweep(width: int) -> None:
    text = shown(listing.shapes(all_configs()), width)
    assert text.index("Shapes") < text.index("Sweeps")
    for config in all_configs():
        assert re.search(rf"^ ?{re.escape(config.name)}\b", text, flags=re.MULTILINE), config.name
        if isinstance(config.content, ShapeFile) and width == 200:
            assert re.search(
                rf"{re.escape(config.name)} +{config.content.hidden} +{config.content.intermediate}\b", text
            )


def test_a_sweep_without_tokens_says_so() -> None:
    from swiglu_bench.spec.shapes import SweepFile

    config = all_configs()[0]
    sweep = type(config)("mine", config.path, SweepFile(shapes=["smoke"], source="made up"), config.node)
    assert "the shapes' own" in shown(listing.shapes([sweep]))


@WIDTHS
def test_the_machine_a_line_per_fact(width: int) -> None:
    about = describe(torch.device("cpu")).as_dict()
    text = shown([listing.machine(about)], width)
    for name in about:
        assert re.search(rf"^ ?{name.replace('_', ' ')}\b", text, flags=re.MULTILINE), name
    assert re.search(r"memory bytes +[\d.]+ GiB", text)
    assert re.search(r"sm count +-", text)


def test_a_dry_run_names_the_cases_and_their_memory() -> None:
    cases = [small_case(tokens=3), small_case(tokens=7, shape=Shape("wide", 4096, 11008, "made up", (1,)))]
    need = [needed_bytes(case, VARIANTS) for case in cases]
    text = shown(listing.dry_run(cases, CATALOGUE[:2], free_bytes=max(need) - 1))
    lines = [line for line in text.splitlines() if " glu " in line]
    assert len(lines) == 2
    for case, size, line in zip(cases, need, lines, strict=True):
        assert re.search(rf"{case.shape.name} +glu +step +float32 +{case.tokens} +{size / 2**20:,.1f} MiB", line)
    assert "skipped: the device has" not in lines[0]
    assert f"skipped: the device has {(max(need) - 1) / 2**30:.1f} GiB free" in lines[1]
    assert text.rstrip().endswith("2 cases x 2 implementations: eager, eager-packed")
