"""The options of `swiglu-bench train`. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option

from swiglu_bench.sweep.options import HOW, OUTPUT, WHAT, Device, Impl, Out, SkipImpl, Wait, WandbOptions

_what, _how, _output = (partial(Option, rich_help_panel=panel) for panel in (WHAT, HOW, OUTPUT))


@dataclass(frozen=True, kw_only=True)
class TrainOptions(WandbOptions):
    """What is trained, how it is timed, and where results go."""

    task: Annotated[str, _what(help="digits, mnist or llama.")] = "digits"
    model: Annotated[
        str | None,
        _what(
            help="Sizes: the name of a file in configs/train, or a YAML path. "
            "\\[default: the task's; llama: llama-1b on a GPU, llama-tiny on a CPU]"
        ),
    ] = None
    data: Annotated[
        Path | None,
        _what(
            help="mnist: a folder that has MNIST/raw with the IDX files; llama: a text file. "
            "\\[default for llama: the sources of Python's standard library]"
        ),
    ] = None
    impl: Impl = None
    skip_impl: SkipImpl = None
    epochs: Annotated[int | None, _what(help="Passes over the images. \\[default: the model's]", min=1)] = None
    steps: Annotated[int | None, _what(help="Steps, instead of epochs. \\[default: the model's]", min=1)] = None
    seeds: Annotated[int, _what(help="Number of seeds from which each is trained.", min=1)] = 3
    seed: Annotated[int, _what(help="The first seed.", min=0, max=2**31)] = 0
    dtype: Annotated[
        str | None,
        _what(help="Of products: bf16 (autocast) or fp32; weights are fp32. \\[default: bf16 on a GPU, fp32 on a CPU]"),
    ] = None
    device: Device = None
    interpret: Annotated[
        bool, _how("--interpret", help="On a CPU, run Triton kernels in its interpreter: for tiny models, not timed.")
    ] = False
    budget: Annotated[
        float | None,
        _how(
            help="Seconds for the rounds in which steps are timed; where it is given, also what takes very long on "
            "this machine is trained. \\[default: 20]",
            min=0.01,
        ),
    ] = None
    step_run: Annotated[
        Path | None,
        _how(help="A run of `step --scope mlp` with this block, for the expected speed-up. \\[default: measured now]"),
    ] = None
    checkpoint_every: Annotated[
        int,
        _output(
            help="Steps between checkpoints, which are removed when a seed's training ends; 0: only at Ctrl-C.", min=0
        ),
    ] = 0
    wait: Wait = True
    out: Out = None
    csv: Annotated[
        bool, _output("--csv/--no-csv", help="Write train.csv, runs.csv, summary.csv, run.json and the curves.")
    ] = True
    resume: Annotated[bool, _output("--resume", help="Continue in the folder of --out, from its checkpoints.")] = False

    @property
    def budget_s(self) -> float:
        """Seconds for the rounds."""
        return 20.0 if self.budget is None else self.budget
