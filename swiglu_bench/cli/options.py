"""The options that commands share: names, help texts and completions. No torch in here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

WHAT, HOW, OUTPUT = "What to run", "How to measure", "Where results go"


def complete_shapes(incomplete: str) -> list[str]:
    """Names of shapes and sweeps that go on from what was typed."""
    from swiglu_bench.spec.shapes import config_names

    return _complete_last(incomplete, config_names())


def complete_implementations(incomplete: str) -> list[str]:
    """Names of implementations that go on from what was typed."""
    from swiglu_bench.implementations import CATALOGUE

    return _complete_last(incomplete, [implementation.name for implementation in CATALOGUE])


def _complete_last(incomplete: str, names: Sequence[str]) -> list[str]:
    """Complete the part after the last comma."""
    head, comma, last = incomplete.rpartition(",")
    return [head + comma + name for name in names if name.startswith(last)]


Shapes = Annotated[
    str | None,
    typer.Option(
        help="Shape or sweep names, YAML paths, or HIDDENxINTERMEDIATE, comma-separated. "
        "\\[default: llama7b on a GPU, smoke on a CPU]",
        rich_help_panel=WHAT, show_default=False, autocompletion=complete_shapes,
    ),
]  # fmt: skip
Tokens = Annotated[
    str | None,
    typer.Option(
        help="Token counts, as 1,128,1k,8k. \\[default: the shape's own]", rich_help_panel=WHAT, show_default=False
    ),
]  # fmt: skip
DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype", help="bf16, fp16, fp32, comma-separated. \\[default: bf16 on a GPU, fp32 on a CPU; verify: all]",
        rich_help_panel=WHAT, show_default=False,
    ),
]  # fmt: skip
ScopeOption = Annotated[
    str | None,
    typer.Option(
        "--scope", help="activation, glu, mlp, comma-separated: the fusion boundary. \\[default: glu; verify: all]",
        rich_help_panel=WHAT, show_default=False,
    ),
]  # fmt: skip
Impl = Annotated[
    list[str] | None,
    typer.Option(
        "--impl", help="Only these implementations: names, globs, or path/to/file.py:name (which runs that file's "
        "code); comma-separated or repeated.",
        rich_help_panel=WHAT, show_default=False, autocompletion=complete_implementations,
    ),
]  # fmt: skip
SkipImpl = Annotated[
    list[str] | None,
    typer.Option("--skip-impl", help="All but these; names or globs.", rich_help_panel=WHAT, show_default=False,
                 autocompletion=complete_implementations),
]  # fmt: skip
Seed = Annotated[
    int, typer.Option(help="Seed of inputs and of the order of rounds.", min=0, max=2**63 - 1, rich_help_panel=WHAT)
]
Device = Annotated[
    str | None,
    typer.Option(
        help="cpu, cuda or cuda:INDEX. \\[default: the first GPU, else the CPU]",
        rich_help_panel=HOW, show_default=False,
    ),
]  # fmt: skip
Gpus = Annotated[
    str | None,
    typer.Option(
        help="Several GPUs of this host, a case on one at a time: indices as 0,1,2,3, or all.",
        rich_help_panel=HOW, show_default=False,
    ),
]  # fmt: skip
Ray = Annotated[
    str | None,
    typer.Option(
        help="All GPUs of a Ray cluster: auto, or HOST:PORT of its head (without GPUs: its CPUs).",
        metavar="ADDRESS", rich_help_panel=HOW, show_default=False,
    ),
]  # fmt: skip
Baseline = Annotated[
    str,
    typer.Option(
        help="The implementation that ratios are to.", rich_help_panel=HOW, autocompletion=complete_implementations
    ),
]  # fmt: skip
Budget = Annotated[
    float,
    typer.Option(help="Seconds for a case's rounds; cases that cannot fit are skipped.", min=0.01, rich_help_panel=HOW),
]  # fmt: skip
L2 = Annotated[str, typer.Option("--l2", help="cold (flushed before each sample) or hot.", rich_help_panel=HOW)]
Regime = Annotated[
    str,
    typer.Option(
        help="steady (no rest between samples, as in training) or rested (a pause before each: the card cools).",
        rich_help_panel=HOW,
    ),
]  # fmt: skip
Energy = Annotated[
    bool,
    typer.Option("--energy/--no-energy", help="On a GPU, 0.5 s for each row's joules per call.", rich_help_panel=HOW),
]
TimeDetail = Annotated[
    bool,
    typer.Option(
        "--detail", "-v", help="Show host time, latency, graph time and energy at all token counts, not only to 256.",
        rich_help_panel=OUTPUT,
    ),
]  # fmt: skip
Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder of files. \\[default: results/GPU/DATE/TIME-COMMAND]", rich_help_panel=OUTPUT, show_default=False
    ),
]  # fmt: skip
Csv = Annotated[
    bool, typer.Option("--csv/--no-csv", help="Write records.csv, samples.csv and run.json.", rich_help_panel=OUTPUT)
]
Form = Annotated[
    str,
    typer.Option(
        "--format", help="table, or for a program json, jsonl or csv: then only that is on stdout.",
        rich_help_panel=OUTPUT,
    ),
]  # fmt: skip
JsonForm = Annotated[
    str,
    typer.Option(
        "--format", help="table, or for a program json: then only that is on stdout.", rich_help_panel=OUTPUT
    ),
]  # fmt: skip
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", help="No progress and no tables: only warnings, failures and where the results are.",
        rich_help_panel=OUTPUT,
    ),
]  # fmt: skip
WANDB = "Weights & Biases"
LogWandb = Annotated[bool, typer.Option("--log-wandb", help="Log to Weights & Biases.", rich_help_panel=WANDB)]
WandbProject = Annotated[str, typer.Option(help="Project.", rich_help_panel=WANDB)]
WandbEntity = Annotated[
    str | None, typer.Option(help="User or team. \\[default: yours]", rich_help_panel=WANDB, show_default=False)
]
WandbGroup = Annotated[
    str | None,
    typer.Option(
        help="Runs of one group stand together, as those of a sweep. \\[default: the command]",
        rich_help_panel=WANDB, show_default=False,
    ),
]  # fmt: skip
WandbTags = Annotated[
    list[str] | None,
    typer.Option(
        help="Tags besides command and GPU, comma-separated or repeated.", rich_help_panel=WANDB, show_default=False
    ),
]  # fmt: skip
WandbId = Annotated[
    str | None,
    typer.Option(help="Id of a run to go on with, or for a new one.", rich_help_panel=WANDB, show_default=False),
]
Detail = Annotated[
    bool,
    typer.Option(
        "--detail", "-v", help="Show of each tensor how its errors are distributed and where the worst is.",
        rich_help_panel=OUTPUT,
    ),
]  # fmt: skip
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the cases and the memory they need, and stop.", rich_help_panel=HOW)
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Go on in the folder of --out: keep finished cases, unless their code, versions, machine or "
        "settings have changed.",
        rich_help_panel=OUTPUT,
    ),
]  # fmt: skip
Timeout = Annotated[
    float,
    typer.Option(
        help="Seconds for one implementation at one case: to import, build, compile and check it; or for one call.",
        min=0.1, rich_help_panel=HOW,
    ),
]  # fmt: skip
InProcess = Annotated[
    bool,
    typer.Option(
        "--in-process", help="No child processes, for debugging: a crash or a hang then ends the sweep.",
        rich_help_panel=HOW,
    ),
]  # fmt: skip
Wait = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Wait for a GPU on which another sweep runs.", rich_help_panel=HOW)
]
TIMEOUT_S = 600.0
"""Minutes, as torch.compile with max-autotune needs them."""
