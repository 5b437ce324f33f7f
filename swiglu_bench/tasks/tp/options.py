"""The options of `swiglu-bench tp`. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from swiglu_bench.options import (
    HOW,
    WHAT,
    Csv,
    Device,
    DtypeOption,
    Out,
    Quiet,
    Seed,
    Shapes,
    SkipImpl,
    Texts,
    Tokens,
    Wait,
    WandbOptions,
    option,
)


@dataclass(frozen=True, kw_only=True)
class TpOptions(WandbOptions):
    """What is split over how many GPUs, how it is timed, and where results go."""

    gpus: Annotated[
        str | None,
        option(WHAT, "GPUs in a group, such as 4, or several in turn, such as 1,2,4; on a CPU, processes. "
               "Under torchrun, the group's own. "
               "\\[default: all GPUs; 2 processes on a CPU]", show_default=False),
    ] = None  # fmt: skip
    shapes: Shapes = None
    tokens: Tokens = None
    modes: Annotated[str, option(WHAT, "forward, step, comma-separated.")] = "forward,step"
    dtype: DtypeOption = None
    impl: Annotated[
        Texts,
        option(WHAT, "Implementations of the scope mlp, or experts: names, globs, or path/to/file.py:name (which runs "
               "that file's code); comma-separated or repeated. eager is always included. \\[default: eager, compile, "
               "compile-async-tp, liger, fused-auto, fused-mlp-auto; for experts eager, grouped, liger-experts, "
               "fused-experts]", show_default=False),
    ] = None  # fmt: skip
    skip_impl: SkipImpl = None
    sequence_parallel: Annotated[
        str,
        option(WHAT, "no (every rank has all tokens; all-reduce), yes (each has its part of them; all-gather and "
               "reduce-scatter) or both. Experts only have yes, with all-to-all."),
    ] = "both"  # fmt: skip
    seed: Seed = 0
    device: Device = None
    budget: Annotated[
        float | None,
        option(HOW, "Seconds for a case's rounds, of which there are at least ten; if it is given, cases that take "
               "very long on this machine are timed too. \\[default: 3]", min=0.01),
    ] = None  # fmt: skip
    timeout: Annotated[
        float,
        option(HOW, "Seconds without progress, compiling included, after which a group of ranks is ended.", min=1.0),
    ] = 180.0
    wait: Wait = True
    out: Out = None
    csv: Csv = True
    quiet: Quiet = False
