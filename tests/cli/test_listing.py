import json
import re

import torch
from command_line import swiglu_bench
from rendered import WIDTHS, shown
from specimens import small_case

from swiglu_bench.cli import listing
from swiglu_bench.implementations import CATALOGUE
from swiglu_bench.machine.machine import describe
from swiglu_bench.spec.cases import VARIANTS, Shape
from swiglu_bench.spec.costs import needed_bytes
from swiglu_bench.spec.implementation import Step, implementation
from swiglu_bench.spec.shapes import ShapeFile, all_configs, config_names

CPU = torch.device("cpu")


@WIDTHS
def test_list(width: int) -> None:
    ran = swiglu_bench("list", "--device", "cpu", width=width)
    assert (ran.code, ran.err) == (0, "")
    text = ran.out
    assert all(len(line) <= width for line in text.splitlines())
    used = set(re.findall(r"\bno \[(\d+)\]", text))
    assert used == set(re.findall(r"^\[(\d+)\] \w", text, flags=re.MULTILINE))
    assert used
    assert "Triton kernels need a GPU;" in " ".join(text.split())
    about = describe(CPU).as_dict()
    for name in [*(one.name for one in CATALOGUE), *config_names(), *(name.replace("_", " ") for name in about)]:
        assert re.search(rf"^ ?{re.escape(name)}\b", text, flags=re.MULTILINE), name
    assert text.index("Implementations") < text.index("Shapes") < text.index("Sweeps") < text.index("Machine")
    assert re.search(r"memory bytes +[\d.]+ GiB", text)
    assert re.search(r"sm count +-", text)
    if width == 200:
        for config in all_configs():
            if isinstance(config.content, ShapeFile):
                sizes = rf"{re.escape(config.name)} +{config.content.hidden} +{config.content.intermediate}\b"
                assert re.search(sizes, text)


def test_list_for_programs() -> None:
    told = json.loads(swiglu_bench("list", "--device", "cpu", "--format", "json").out)
    assert [one["name"] for one in told["implementations"]] == [one.name for one in CATALOGUE]
    assert sorted(one["name"] for one in (*told["shapes"], *told["sweeps"])) == config_names()
    fused = next(one for one in told["implementations"] if one["name"] == "fused")
    assert "Triton" in fused["unavailable"]
    assert told["machine"]["torch"] == torch.__version__


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
    told = {"implementations": listing.implementations(some, describe(CPU)), "shapes": [], "sweeps": [], "machine": {}}
    text = shown(listing.tables(told), 200)
    assert re.search(r"all-round +all +all +separate +yes +does all", text)
    assert re.search(r"packed +glu mlp +inputs +packed +yes", text)
    assert re.search(r"server +glu +none +separate +no \[1\]", text)
    assert "[1] The package surely_not_installed is not installed." in text


def test_a_dry_run_names_the_cases_and_their_memory() -> None:
    cases = [small_case(tokens=3), small_case(tokens=7, shape=Shape("wide", 4096, 11008, "made up", (1,)))]
    need = [needed_bytes(case, VARIANTS) for case in cases]
    text = shown(listing.dry_run(cases, CATALOGUE[:2], free_bytes=max(need) - 1), 200)
    lines = [line for line in text.splitlines() if " glu " in line]
    assert len(lines) == 2
    for case, size, line in zip(cases, need, lines, strict=True):
        assert re.search(rf"{case.shape.name} +glu +step +float32 +{case.tokens} +{size / 2**20:,.1f} MiB", line)
    assert "skipped: the device has" not in lines[0]
    assert f"skipped: the device has {(max(need) - 1) / 2**30:.1f} GiB free" in lines[1]
    assert text.rstrip().endswith("2 cases x 2 implementations: eager, eager-packed")
