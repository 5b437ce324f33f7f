"""The options of commands, each stated once: its type, default, help text, panel and completion. No torch in here.

The measuring commands and `audit` have a dataclass each; the command line, `swiglu_bench.run` and run.json read its
fields. The types that have a name are shared with other commands.
"""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Context, Exit, Option, echo
from typer.core import TyperCommand
from typer.models import OptionInfo

from swiglu_bench.cases.errors import one_of

WHAT, HOW, OUTPUT, WANDB = "What to run", "How to measure", "Where results go", "Weights & Biases"
"""The panels of `--help`."""
STATUS = (
    "Exit status: 0: every row has what was asked for; 1: a row is incorrect or an error, or results were lost; 2: bad "
    "input; 3: nothing is wrong, but something is not known (a row is unsettled, or skipped for lack of memory or of "
    "--budget, or nothing that was requested can run here); 130: interrupted."
)
"""Of the commands that measure or check."""
RARE = frozenset([
    "tp", "routing", "find_links", "pythons", "seed", "skip_impl", "ray", "timeout", "in_process", "wait", "rounds",
    "warmup", "l2", "regime", "lock_clocks", "new_tokens", "trace", "ncu", "energy", "csv", "save_baseline",
    "accumulate", "wandb_project", "wandb_entity", "wandb_group", "wandb_tags", "wandb_id", "strict", "interpret",
    "sequence_parallel", "candidates", "layers",
])  # fmt: skip
"""Options that only `--help-all` shows, where a command has that."""
TASKS = ("digits", "mnist", "llama")
"""What `train` trains."""
SEEDS = {"min": 0, "max": 2**63 - 1}
TIMEOUT_S = 600.0
"""torch.compile with max-autotune takes minutes."""


def complete_shapes(incomplete: str) -> list[str]:
    """Names of shapes and sweeps that continue what was typed."""
    from swiglu_bench.cases.shapes import config_names

    return _complete_last(incomplete, config_names())


def complete_implementations(incomplete: str) -> list[str]:
    """Names of implementations that continue what was typed."""
    from swiglu_bench.contenders import CATALOGUE

    return _complete_last(incomplete, [implementation.name for implementation in CATALOGUE])


def _complete_last(incomplete: str, names: Sequence[str]) -> list[str]:
    head, comma, last = incomplete.rpartition(",")
    return [head + comma + name for name in names if name.startswith(last)]


def option(panel: str, help: str, *names: str, **more: Any) -> OptionInfo:
    """An option under a panel of `--help`, named after its parameter unless `names` are given."""
    return Option(*names, help=help, rich_help_panel=panel, **more)


# fmt: off
SHAPE, MODE = ("--shapes", "--shape"), ("--modes", "--mode")
"""Both names of an option, whichever a user thinks of."""
Text = str | None
Texts = list[str] | None
Shapes = Annotated[Text, option(WHAT, "Shape or sweep names, YAML files, HIDDENxINTERMEDIATE, random:N or "
    "random-experts:N (layers or mixtures drawn by --seed, each with a token count), or models: a config.json or a "
    "name in the local Hugging Face cache; comma-separated. \\[default: llama7b on a GPU, smoke on a CPU]", *SHAPE,
    autocompletion=complete_shapes)]
Tokens = Annotated[Text, option(WHAT, "Token counts, such as 1,128,1k,8k. \\[default: the shape's own]")]
DtypeOption = Annotated[Text, option(WHAT, "bf16, fp16, fp32, comma-separated. \\[default: bf16 on a GPU, fp32 on a "
    "CPU; verify: all]")]
ScopeOption = Annotated[Text, option(WHAT, "activation, glu, mlp, comma-separated: the fusion boundary; or experts, "
    "for a shape with experts. \\[default: glu, or experts for such shapes; verify, audit: all]")]
Routing = Annotated[Text, option(WHAT, "balanced, uniform, zipf, single or local (half of the experts on other ranks), "
    "comma-separated: how the experts of each token are drawn. \\[default: uniform]")]
PrecisionOption = Annotated[Text, option(WHAT, "bf16, fp8-tensorwise, fp8-rowwise or fp8-blockwise, comma-separated: "
    "how the operands of products are quantised. \\[default: not at all]")]
Impl = Annotated[Texts, option(WHAT, "Only these implementations: names, globs, or path/to/file.py:name (which runs "
    "that file's code; the name of its only one may be left out); comma-separated or repeated.",
    autocompletion=complete_implementations)]
SkipImpl = Annotated[Texts, option(WHAT, "All implementations except these: names or globs.",
    autocompletion=complete_implementations)]
Packages = Annotated[Texts, option(WHAT, "Implementations again, with other packages, which uv fetches: "
    "liger@old=liger-kernel==0.7.0 adds liger@old, 'liger@{0.6.0,0.7.0}=liger-kernel=={}' two. May be repeated.",
    "--with", metavar="NAME@TAG=REQUIREMENT")]
FindLinks = Annotated[Text, option(WHAT, "Where --with also looks for packages: a folder, or the URL of a page.")]
Pythons = Annotated[Texts, option(WHAT, "Implementations under another interpreter, which has torch and NumPy of its "
    "own: sonic=/opt/sonic/bin/python; eager@new=... adds eager@new. May be repeated.", "--python",
    metavar="NAME=EXECUTABLE")]
Seed = Annotated[int, option(WHAT, "Seed of the inputs, of the order within each round and of random:N.", **SEEDS)]
ShapeSeed = Annotated[int, option(WHAT, "Seed of random:N.", **SEEDS)]
Device = Annotated[Text, option(HOW, "cpu, cuda or cuda:INDEX. \\[default: the first GPU, else the CPU]")]
Budget = Annotated[float, option(HOW, "Seconds for a case's rounds; a case that cannot fit is skipped.", min=0.01)]
Timeout = Annotated[float, option(HOW, "Seconds to import, build, compile and check an implementation at one case, "
    "or for one call.", min=0.1)]
InProcess = Annotated[bool, option(HOW, "No child processes: a crash or hang then ends the command.", "--in-process")]
Wait = Annotated[bool, option(HOW, "Wait for a GPU that another sweep is using.")]
TimeDetail = Annotated[bool, option(OUTPUT, "Show host time, latency, graph time and energy at every token count, "
    "not only up to 256.", "--detail", "-v")]
Quiet = Annotated[bool, option(OUTPUT, "Show no progress and no tables: only warnings, failures and where the results "
    "are.", "--quiet", "-q")]
Out = Annotated[Path | None, option(OUTPUT, "Folder for the files. \\[default: results/GPU/DATE/TIME-COMMAND]")]
Resume = Annotated[bool, option(OUTPUT, "Continue in the folder of --out: keep finished cases, unless their code, "
    "versions, machine or settings have changed.", "--resume")]
Force = Annotated[bool, option(OUTPUT, "Start again in the folder of --out: delete the rows that it has.", "--force")]
Csv = Annotated[bool, option(OUTPUT, "Write records.csv, samples.csv and run.json.")]
Form = Annotated[str, option(OUTPUT, "table, or json, jsonl or csv for a program: stdout then carries nothing else.",
    "--format", callback=lambda form: one_of("--format", form, "table", "json", "jsonl", "csv"))]
JsonForm = Annotated[str, option(OUTPUT, "table, or json for a program: stdout then carries nothing else.",
    "--format", callback=lambda form: one_of("--format", form, "table", "json"))]


@dataclass(frozen=True, kw_only=True)
class WandbRunOptions:
    """Which Weights & Biases run rows go to."""

    wandb_project: Annotated[str, option(WANDB, "Project.")] = "swiglu-bench"
    wandb_entity: Annotated[Text, option(WANDB, "User or team. \\[default: your own]")] = None
    wandb_group: Annotated[Text, option(WANDB, "Runs of one group are shown together. \\[default: the command]")] = None
    wandb_tags: Annotated[Texts, option(WANDB, "Tags besides the command and the GPU, comma-separated or "
        "repeated.")] = None
    wandb_id: Annotated[Text, option(WANDB, "Id of a run to continue, or of a new one.")] = None


@dataclass(frozen=True, kw_only=True)
class WandbOptions(WandbRunOptions):
    """Whether rows go to one."""

    log_wandb: Annotated[bool, option(WANDB, "Log to Weights & Biases.", "--log-wandb")] = False


@dataclass(frozen=True, kw_only=True)
class SweepOptions(WandbOptions):
    """The options of `memory`, and those that the other measuring commands share with it."""

    shapes: Shapes = None
    tp: Annotated[int, option(WHAT, "Measure each shape as one of N tensor-parallel GPUs holds it: intermediate / N.",
        min=1)] = 1
    tokens: Tokens = None
    dtype: DtypeOption = None
    scope: ScopeOption = None
    routing: Routing = None
    precision: PrecisionOption = None
    impl: Impl = None
    skip_impl: SkipImpl = None
    packages: Packages = None
    find_links: FindLinks = None
    pythons: Pythons = None
    seed: Annotated[int, option(WHAT, "Seed of the order within each round and of random:N; inputs are new in every "
        "run.", **SEEDS)] = 0
    device: Device = None
    gpus: Annotated[Text, option(HOW, "Several GPUs of this host, each with one case at a time: indices such as "
        "0,1,2,3, or all.")] = None
    ray: Annotated[Text, option(HOW, "All GPUs of a Ray cluster, or its CPUs where it has no GPU: auto, or HOST:PORT "
        "of the head node.", metavar="ADDRESS")] = None
    timeout: Timeout = TIMEOUT_S
    budget: Annotated[float, option(HOW, "Estimated seconds that this may take on a CPU; a longer run is refused at "
        "once.", min=0.01)] = 1800.0
    in_process: InProcess = False
    wait: Wait = True
    detail: Annotated[bool, option(OUTPUT, "Show for each tensor how its errors are distributed and where the "
        "largest one is.", "--detail", "-v")] = False
    quiet: Quiet = False
    out: Out = None
    resume: Resume = False
    force: Force = False
    csv: Csv = True
    save_baseline: Annotated[Text, option(OUTPUT, "Save the run under a name, for `swiglu-bench compare NAME`.",
        metavar="NAME")] = None


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(SweepOptions):
    """The options of `verify`."""

    sanitize: Annotated[Text, option(HOW, "Call each implementation once under NVIDIA's compute-sanitizer instead: "
        "memcheck, racecheck, initcheck or synccheck.", metavar="TOOL")] = None


@dataclass(frozen=True, kw_only=True)
class TimingOptions(SweepOptions):
    """The options of `forward`, `backward` and `step`."""

    workload: Annotated[Path | None, option(WHAT, "JSON or CSV of token counts with weights, such as those a server "
        "saw: they are timed and combined into one figure per implementation.")] = None
    baseline: Annotated[Text, option(HOW, "The implementation that ratios are relative to. \\[default: eager; for "
        "experts, grouped]", autocompletion=complete_implementations, show_default=False)] = None
    budget: Budget = 20.0
    rounds: Annotated[int | None, option(HOW, "Run exactly this many rounds. \\[default: until ratios are known to "
        "0.5%]", min=2)] = None
    warmup: Annotated[int, option(HOW, "Warm-up rounds, which are not kept.", min=0)] = 3
    l2: Annotated[str, option(HOW, "cold (flushed before each sample), hot, or both: cold, and hot_us beside "
        "it.")] = "cold"
    regime: Annotated[str, option(HOW, "steady (no pause between samples, as in training) or rested (a pause before "
        "each sample, in which the GPU cools).")] = "steady"
    new_tokens: Annotated[int, option(HOW, "After the rounds, call each with so many further token counts, once, and "
        "keep the longest call.", min=0, max=200, metavar="N")] = 0
    accumulate: Annotated[int, option(WHAT, "Of step: micro-batches of an optimiser's step, each with a forward and "
        "backward of so many --tokens; gradients of weights add up, and weights are written between steps.", min=1,
        max=64, metavar="N")] = 1
    lock_clocks: Annotated[int | None, option(HOW, "Hold the GPU's clock at so many MHz while the command runs; needs "
        "the right to do so.", min=100, metavar="MHZ")] = None
    layers: Annotated[int, option(HOW, "On a GPU, record N layers in one CUDA graph, each with weights and inputs of "
        "its own as in a model; graph_us is the time of one of them.", min=1, max=64)] = 1
    trace: Annotated[bool, option(HOW, "After the rounds, write a trace of each contender's calls, which Perfetto "
        "opens.", "--trace")] = False
    ncu: Annotated[bool, option(HOW, "After the rounds, read tensor-core use, DRAM and L2 bytes, and registers by "
        "Nsight Compute.", "--ncu")] = False
    energy: Annotated[bool, option(HOW, "On a GPU, measure joules per call for 0.4 s a row.")] = True
    detail: TimeDetail = False


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """The options of `audit`."""

    impl: Impl = None
    skip_impl: SkipImpl = None
    scope: ScopeOption = None
    dtype: DtypeOption = None
    device: Device = None
    timeout: Timeout = TIMEOUT_S
    in_process: InProcess = False
    wait: Wait = True
    out: Out = None
    csv: Csv = True
    strict: Annotated[bool, option(HOW, "Exit with 1 if any cell is a fail.", "--strict")] = False


@dataclass(frozen=True, kw_only=True)
class TpOptions(WandbOptions):
    """What is split over how many GPUs, how it is timed, and where results go."""

    gpus: Annotated[Text, option(WHAT, "GPUs in a group, such as 4, or several in turn, such as 1,2,4; on a CPU, "
        "processes. Under torchrun, the group's own. \\[default: all GPUs; 2 processes on a CPU]",
        show_default=False)] = None
    shapes: Shapes = None
    tokens: Tokens = None
    modes: Annotated[str, option(WHAT, "forward, step, comma-separated.", *MODE)] = "forward,step"
    dtype: DtypeOption = None
    routing: Routing = None
    impl: Annotated[Texts, option(WHAT, "Implementations of the scope mlp, or experts: names, globs, or "
        "path/to/file.py:name (which runs that file's code); comma-separated or repeated. eager is always included. "
        "\\[default: eager, compile, compile-async-tp, liger, fused-auto, fused-mlp-auto; for experts eager, grouped, "
        "liger-experts, fused-experts]", show_default=False)] = None
    skip_impl: SkipImpl = None
    sequence_parallel: Annotated[str, option(WHAT, "no (every rank has all tokens; all-reduce), yes (each has its "
        "part of them; all-gather and reduce-scatter) or both. Experts only have yes, with all-to-all.")] = "both"
    seed: Seed = 0
    device: Device = None
    budget: Annotated[float | None, option(HOW, "Seconds for a case's rounds, of which there are at least ten; if it "
        "is given, cases that take very long on this machine are timed too. \\[default: 3]", min=0.01)] = None
    timeout: Annotated[float, option(HOW, "Seconds without progress, compiling included, after which a group of ranks "
        "is ended.", min=1.0)] = 180.0
    wait: Wait = True
    out: Out = None
    csv: Csv = True
    quiet: Quiet = False


@dataclass(frozen=True, kw_only=True)
class TrainOptions(WandbOptions):
    """What is trained, how it is timed, and where results go."""

    task: Annotated[str, option(WHAT, f"{TASKS[0]}, {TASKS[1]} or {TASKS[2]}.")] = "digits"
    model: Annotated[Text, option(WHAT, "Sizes: the name of a file in configs/train, or a YAML path. \\[default: the "
        "task's; llama: llama-1b on a GPU, llama-tiny on a CPU]")] = None
    data: Annotated[Path | None, option(WHAT, "mnist: a folder that has MNIST/raw with the IDX files; llama: a text "
        "file. \\[default for llama: the sources of Python's standard library]")] = None
    impl: Impl = None
    skip_impl: SkipImpl = None
    epochs: Annotated[int | None, option(WHAT, "Passes over the images. \\[default: the model's]", min=1)] = None
    steps: Annotated[int | None, option(WHAT, "Steps, instead of epochs. \\[default: the model's]", min=1)] = None
    seeds: Annotated[int, option(WHAT, "Number of seeds from which each is trained.", min=1)] = 3
    seed: Annotated[int, option(WHAT, "The first seed.", min=0, max=2**31)] = 0
    dtype: Annotated[Text, option(WHAT, "The dtype of products: bf16 (autocast) or fp32; weights are fp32. "
        "\\[default: bf16 on a GPU, fp32 on a CPU]")] = None
    precision: Annotated[Text, option(WHAT, "fp8-tensorwise, fp8-rowwise or fp8-blockwise: how implementations that "
        "support it quantise the operands of the blocks' products; the others train in bf16. "
        "\\[default: not at all]")] = None
    device: Device = None
    interpret: Annotated[bool, option(HOW, "On a CPU, run kernels in Triton's interpreter: for tiny models, not "
        "timed.", "--interpret")] = False
    budget: Annotated[float | None, option(HOW, "Seconds for the rounds in which steps are timed; if it is given, "
        "models that take very long on this machine are trained too. \\[default: 20]", min=0.01)] = None
    wait: Wait = True
    out: Out = None
    csv: Annotated[bool, option(OUTPUT, "Write train.csv, runs.csv, summary.csv, run.json and the curves.",
        "--csv/--no-csv")] = True

    @property
    def budget_s(self) -> float:
        """Seconds for the rounds."""
        return 20.0 if self.budget is None else self.budget


COMMANDS: dict[str, type[SweepOptions]] = {"forward": TimingOptions, "backward": TimingOptions, "step": TimingOptions,
    "memory": SweepOptions, "verify": VerifyOptions}
"""The commands that measure or check every implementation at every case."""
# fmt: on


def parameters(options: type, for_typer: bool) -> list[inspect.Parameter]:
    """The fields of an options class as parameters of a function; Typer wants their help texts, Python does not."""
    types, kind = typing.get_type_hints(options, include_extras=for_typer), inspect.Parameter.KEYWORD_ONLY
    # The panel of W&B is the last, and begins with what turns it on.
    fields = sorted(dataclasses.fields(options), key=lambda own: ("wandb" in own.name) + own.name.startswith("wandb"))
    return [inspect.Parameter(each.name, kind, default=each.default, annotation=types[each.name]) for each in fields]


def given(options: Any) -> dict[str, Any]:
    """An options object as plain data for run.json."""
    found = dataclasses.asdict(options)
    return {name: str(value) if isinstance(value, Path) else value for name, value in found.items()}


# From options to commands that Typer understands, whose --help leaves rare options to --help-all


class Command(TyperCommand):
    """A command whose rare options are shown by --help-all only, if it has that."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        short = any(option.name == "help_all" for option in self.params) and not ctx.params.get("help_all")
        for option in self.params:
            setattr(option, "hidden", short and option.name in RARE)  # noqa: B010 -- mypy: only options have it
        super().format_help(ctx, formatter)


def _help_all(context: Context, wanted: bool) -> None:
    if wanted:
        context.params["help_all"] = True
        echo(context.get_help())
        raise Exit


HELP_ALL = inspect.Parameter("help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[
    bool, Option("--help-all", help="Show rare options, too.", callback=_help_all, is_eager=True)])  # fmt: skip


def folding(
    command: Callable[..., None], check: Callable[[dict[str, Any]], None] = lambda values: None
) -> Callable[..., None]:
    """The command with --help-all, if it has rare options; `check` gets the values before any work."""
    shown = list(inspect.signature(command, eval_str=True).parameters.values())

    @functools.wraps(command)
    def folded(help_all: bool = False, **values: Any) -> None:
        check(values)
        command(**values)

    named = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in shown]
    named += [HELP_ALL] * any(parameter.name in RARE for parameter in shown)
    setattr(folded, "__signature__", inspect.Signature(named))  # noqa: B010 -- mypy knows no such attribute
    return folded


def command_of(options: type, call: Callable[..., None], help: str | None = None) -> Callable[..., None]:
    """A command of `call`: an option for each field of `options`, its first argument, and each further parameter."""
    _, *own = inspect.signature(call, eval_str=True).parameters.values()
    further = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]

    def command(**values: Any) -> None:
        others = {parameter.name: values.pop(parameter.name) for parameter in further}
        call(options(**values), **others)

    signature = inspect.Signature([*parameters(options, for_typer=True), *further])
    setattr(command, "__signature__", signature)  # noqa: B010 -- mypy knows no such attribute
    command.__doc__ = help or call.__doc__
    return command
