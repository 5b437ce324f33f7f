"""The options of `swiglu-bench train`. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from swiglu_bench.options import HOW, OUTPUT, WHAT, Device, Impl, Out, SkipImpl, Text, Wait, WandbOptions, option


@dataclass(frozen=True, kw_only=True)
class TrainOptions(WandbOptions):
    """What is trained, how it is timed, and where results go."""

    task: Annotated[str, option(WHAT, "digits, mnist or llama.")] = "digits"
    model: Annotated[
        Text,
        option(WHAT, "Sizes: the name of a file in configs/train, or a YAML path. "
               "\\[default: the task's; llama: llama-1b on a GPU, llama-tiny on a CPU]"),
    ] = None  # fmt: skip
    data: Annotated[
        Path | None,
        option(WHAT, "mnist: a folder that has MNIST/raw with the IDX files; llama: a text file. "
               "\\[default for llama: the sources of Python's standard library]"),
    ] = None  # fmt: skip
    impl: Impl = None
    skip_impl: SkipImpl = None
    epochs: Annotated[int | None, option(WHAT, "Passes over the images. \\[default: the model's]", min=1)] = None
    steps: Annotated[int | None, option(WHAT, "Steps, instead of epochs. \\[default: the model's]", min=1)] = None
    seeds: Annotated[int, option(WHAT, "Number of seeds from which each is trained.", min=1)] = 3
    seed: Annotated[int, option(WHAT, "The first seed.", min=0, max=2**31)] = 0
    dtype: Annotated[
        Text,
        option(WHAT, "The dtype of products: bf16 (autocast) or fp32; weights are fp32. "
               "\\[default: bf16 on a GPU, fp32 on a CPU]"),
    ] = None  # fmt: skip
    precision: Annotated[
        Text,
        option(WHAT, "fp8-tensorwise, fp8-rowwise or fp8-blockwise: how implementations that support it "
               "quantise the operands of the blocks' products; the others train in bf16. \\[default: not at all]"),
    ] = None  # fmt: skip
    device: Device = None
    interpret: Annotated[
        bool, option(HOW, "On a CPU, run kernels in Triton's interpreter: for tiny models, not timed.", "--interpret")
    ] = False
    budget: Annotated[
        float | None,
        option(HOW, "Seconds for the rounds in which steps are timed; if it is given, models that "
               "take very long on this machine are trained too. \\[default: 20]", min=0.01),
    ] = None  # fmt: skip
    step_run: Annotated[
        Path | None,
        option(HOW, "A run of `step --scope mlp` with this block, for the expected speed-up. "
               "\\[default: measured now]"),
    ] = None  # fmt: skip
    checkpoint_every: Annotated[
        int,
        option(OUTPUT, "Steps between checkpoints, which are removed when a seed's training ends; 0: only at Ctrl-C.",
               min=0),
    ] = 0  # fmt: skip
    wait: Wait = True
    out: Out = None
    csv: Annotated[
        bool, option(OUTPUT, "Write train.csv, runs.csv, summary.csv, run.json and the curves.", "--csv/--no-csv")
    ] = True
    resume: Annotated[bool, option(OUTPUT, "Continue in the folder of --out, from its checkpoints.", "--resume")] = (
        False
    )

    @property
    def budget_s(self) -> float:
        """Seconds for the rounds."""
        return 20.0 if self.budget is None else self.budget
