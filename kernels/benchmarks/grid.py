"""Hold swiglu_kernels against eager, torch.compile and Liger at untuned sizes: 200 cases from one seed.

    python kernels/benchmarks/grid.py --csv FILE [--part 1/4] [--seconds 540]      # measures what FILE lacks
    python kernels/benchmarks/grid.py --csv FILE [FILE ...] --picture STEM         # only shows what is there

Tokens are log-uniform from 1 to 16384, not rounded. Layers are the ten sizes of models in configs/ and ten more whose
hidden and intermediate sizes are odd multiples of 8; each layer has as many cases. Each case is measured as `forward`
(without a gradient), `glu step` and `mlp step`, by two clocks, all contenders in the same rounds:

    device   GPU time behind a filled queue with a cold L2 cache, as the suite's own tables have it
    caller   from an idle GPU through CALLS calls in a row to an idle GPU, over their number: the host is included.
             Where they take longer than CALLER_MS, they are fewer. Where one call keeps the GPU busy for longer than
             HOST_HIDDEN_MS, the host does not show, and there is no such row

A ratio is ours / theirs: the median of the ratios of each round, with its 95% interval. `slower` and `faster` are the
suite's verdicts; the noise is that of a second build of ours in the same rounds. The rounds, 10 at least, end when each
ratio is known to 0.5% or has a verdict at 99%, or when --budget is spent. Whose results are further from fp64 than the
suite allows has no time. Models compile a layer once and call it with any number of tokens, and so does the contender
`compile`: the layer's sizes are static, the tokens dynamic. With --static it is compiled anew for each number of
tokens, which takes hundreds of compilations, most of the time of a run.
"""

import argparse
import csv
import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from swiglu_bench.check.built import Built
from swiglu_bench.check.inputs import Draw, make_problem
from swiglu_bench.check.judge import Judge
from swiglu_bench.implementations import fused, liger, pytorch
from swiglu_bench.measure.clock import Clock, LatencyClock, Sample, make_clock
from swiglu_bench.measure.rounds import Contender, Rounds, Rule, run_rounds
from swiglu_bench.measure.statistics import Verdict, percentile, verdict
from swiglu_bench.spec.cases import DTYPE_ALIASES, Case, Mode, Scope, Shape
from swiglu_bench.spec.errors import one_line
from swiglu_bench.spec.implementation import Implementation, Step
from swiglu_bench.spec.problem import Problem
from swiglu_bench.spec.shapes import load_shapes

MODELS = (
    "llama7b,llama3-8b,llama3-70b,qwen2.5-7b,qwen3-32b,deepseek-v3-expert,gpt-oss,olmoe,qwen3-30b-a3b,qwen3-235b-a22b"
)
"""One name for each pair of sizes in configs/; of a mixture, the sizes of one expert."""
KINDS = {"forward": (Scope.GLU, Mode.FORWARD), "glu step": (Scope.GLU, Mode.STEP), "mlp step": (Scope.MLP, Mode.STEP)}
OURS, AGAIN, RIVALS = "ours", "ours again", ("eager", "compile", "liger")
DEVICE, CALLER = "device", "caller"
CALLS, CALLER_MS, HOST_HIDDEN_MS = 20, 20.0, 2.0
SETTLED = 0.99
"""Confidence at which a verdict ends the rounds; it is asked for several times."""
OUTCOMES = ["ours is not slower", "ours is slower"]
Layer = tuple[int, int]
"""Hidden and intermediate size."""


@dataclasses.dataclass
class Row:
    """Ours against one contender, in one case, by one clock."""

    hidden: int
    intermediate: int
    tokens: int
    kind: str
    clock: str
    against: str
    calls: int = 1
    """In a row; the times are those of one."""
    ours_ms: float = math.nan
    theirs_ms: float = math.nan
    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    noise: float = math.nan
    """How far from 1 the interval of a second build of ours reaches."""
    verdict: str = ""
    """"" where there is no ratio."""
    rounds: int = 0
    note: str = ""
    """Why there is no ratio."""
    machine: str = ""

    @property
    def case(self) -> tuple[int, int, int, str]:
        """What was measured, whoever is compared and by whichever clock."""
        return self.hidden, self.intermediate, self.tokens, self.kind


def draw(shapes: Sequence[Shape], count: int, most_tokens: int, seed: int) -> dict[Layer, list[int]]:
    """Draw the cases: for each layer its numbers of tokens; as many odd layers as there are others."""
    source = random.Random(seed)

    def log_uniform(low: float, high: float) -> float:
        return math.exp(source.uniform(math.log(low), math.log(high)))

    def odd(sizes: Sequence[int]) -> int:
        return 8 * (2 * int(log_uniform(min(sizes), max(sizes)) / 16) + 1)

    layers = [(one.hidden, one.intermediate) for one in shapes]
    layers += [(odd([one.hidden for one in shapes]), odd([one.intermediate for one in shapes])) for _ in shapes]
    drawn: dict[Layer, list[int]] = {layer: [] for layer in layers}
    for number in range(count):
        counts = drawn[layers[number % len(layers)]]
        counts.append(next(one for one in iter(lambda: round(log_uniform(1, most_tokens)), 0) if one not in counts))
    return drawn


def compiled(problem: Problem) -> Step:
    """Eager under torch.compile, for any number of tokens."""
    forward, compiles = torch.compile(pytorch.eager.build(problem).forward, fullgraph=True), True

    def marked(x: torch.Tensor) -> torch.Tensor:
        nonlocal compiles
        if compiles:
            torch._dynamo.maybe_mark_dynamic(x, 0)
            compiles = False
        return forward(x)

    return Step(marked)


def contenders(kind: str, rivals: Sequence[str], static: bool) -> dict[str, Implementation]:
    """Return ours, twice, and those that it is held against."""
    ours = fused.ROWS["fused-mlp-auto" if KINDS[kind][0] is Scope.MLP else "fused-auto"]
    compiles = pytorch.compiled if static else dataclasses.replace(pytorch.compiled, build=compiled)
    others = dict(zip(RIVALS, (pytorch.eager, compiles, liger.liger), strict=True))
    return {OURS: ours, AGAIN: ours} | {name: others[name] for name in rivals}


def built(chosen: dict[str, Implementation], problem: Problem) -> tuple[dict[str, Built], dict[str, str]]:
    """Return those that yield right results, and why others do not take part."""
    judge, draw, mode = Judge(problem), Draw(1), problem.case.mode
    ready: dict[str, Built] = {}
    reasons: dict[str, str] = {}
    for name, implementation in chosen.items():
        try:
            one = Built(implementation, problem)
            produced = one.infer(draw) if mode is Mode.FORWARD else one.train(draw)
            wrong = [f"{check.tensor}: {check.reason}" for check in judge.judge(produced, draw) if not check.ok]
        except Exception as error:  # whatever a contender raises is its own affair
            wrong = [one_line(error)]
        if wrong:
            reasons[name] = "; ".join(wrong)
        else:
            ready[name] = one
    return ready, reasons


def on_device(one: Built, mode: Mode, clock: Clock) -> Contender:
    """Return what times one call on inputs of its own, behind a filled queue."""

    def take(number: int, lead_us: float) -> Sample:
        call = one.call(mode, Draw(1000 + number))
        return clock.sample(lambda: call.run(clock.pause), lead_us, call.prepare)

    return Contender("", take)


def as_felt(one: Built, mode: Mode, clock: Clock, calls: int) -> Contender:
    """Return what times calls in a row on the same inputs, from an idle device to an idle device."""
    work = one.recordable(mode)

    def in_a_row() -> None:
        for _ in range(calls):
            work()

    return Contender("", lambda number, lead_us: clock.sample(in_a_row, lead_us))


def settled(rounds: Rounds) -> bool:
    """Whether more rounds would hardly change any verdict: each ratio is known well, or clearly above or below 1."""
    noise = rounds.ratio(AGAIN, OURS, SETTLED)
    rivals = (name for name, timing in rounds.timings.items() if name not in (OURS, AGAIN) and not timing.failure)
    ratios = [rounds.ratio(OURS, name, SETTLED) for name in rivals]
    return noise is not None and all(
        one is not None and (verdict(one, noise.noise) != Verdict.TIE or one.half_width <= Rule.precision * one.median)
        for one in ratios
    )


def rows_of(
    like: Row, chosen: dict[str, Implementation], ready: dict[str, Built], reasons: dict[str, str],
    contender: Callable[[Built], Contender], rule: Rule,
) -> Iterator[Row]:  # fmt: skip
    """Play the rounds of one clock; one row for each that ours is held against."""
    timed = [dataclasses.replace(contender(one), name=name) for name, one in ready.items()]
    rounds = run_rounds(timed, rule, baseline=OURS, settled=settled) if OURS in ready else Rounds({}, "")
    reasons = reasons | {name: one_line(timing.failure) for name, timing in rounds.timings.items() if timing.failure}

    def ms(name: str) -> float:
        return percentile(rounds.timings[name].ms, 50) / like.calls

    again = None if {OURS, AGAIN} & reasons.keys() else rounds.ratio(AGAIN, OURS)
    for name in (one for one in chosen if one not in (OURS, AGAIN)):
        row = dataclasses.replace(like, against=name)
        why = reasons.get(OURS) or reasons.get(AGAIN) or reasons.get(name)
        ratio = None if why or again is None else rounds.ratio(OURS, name)
        if ratio is None or again is None:
            row.note = f"{OURS}: {reasons[OURS]}" if OURS in reasons else why or ""
        else:
            row.ours_ms, row.theirs_ms, row.rounds = ms(OURS), ms(name), len(rounds.timings[name].samples)
            row.ratio, row.low, row.high, row.noise = ratio.median, ratio.low, ratio.high, again.noise
            row.verdict = str(verdict(ratio, again.noise))
        yield row


def measure(like: Row, chosen: dict[str, Implementation], problem: Problem, clock: Clock, rule: Rule) -> list[Row]:
    """Measure one case by both clocks."""
    mode = problem.case.mode
    ready, reasons = built(chosen, problem)
    device = partial(on_device, mode=mode, clock=clock)
    rows = list(rows_of(dataclasses.replace(like, clock=DEVICE), chosen, ready, reasons, device, rule))
    known = next((row.ours_ms for row in rows if row.verdict), 0.0)
    if known > HOST_HIDDEN_MS:
        return rows
    calls = min(CALLS, int(CALLER_MS / known)) if known else CALLS
    felt = partial(as_felt, mode=mode, clock=LatencyClock(clock), calls=calls)
    caller = dataclasses.replace(like, clock=CALLER, calls=calls)
    return [*rows, *rows_of(caller, chosen, ready, reasons, felt, rule)]


def read(files: Sequence[Path]) -> list[Row]:
    """Return the rows of files, those that exist."""
    rows = []
    for file in files:
        if file.exists():
            with file.open(newline="", encoding="utf-8") as lines:
                kinds: dict[str, Any] = {one.name: one.type for one in dataclasses.fields(Row)}
                rows += [
                    Row(**{name: kinds[name](text) for name, text in row.items()}) for row in csv.DictReader(lines)
                ]
    return rows


def write(file: Path, rows: Sequence[Row]) -> None:
    """Replace the file at once, so that whoever is stopped has lost one case at most."""
    temporary = file.with_name(f".{file.name}")
    with temporary.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, [one.name for one in dataclasses.fields(Row)])
        writer.writeheader()
        for row in rows:
            plain = dataclasses.asdict(row)
            writer.writerow({name: f"{one:.6g}" if isinstance(one, float) else one for name, one in plain.items()})
    temporary.replace(file)


def hardest(rows: Sequence[Row]) -> list[Row]:
    """Return for each case and clock the row of whoever is fastest beside ours; `slower` if ours is slower than any."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if row.verdict:
            groups.setdefault((*row.case, row.clock), []).append(row)
    found = []
    for group in groups.values():
        slower = any(row.verdict == Verdict.SLOWER for row in group)
        worst = max(group, key=lambda row: row.ratio)
        found.append(dataclasses.replace(worst, verdict=str(Verdict.SLOWER)) if slower else worst)
    return found


def summary(rows: Sequence[Row]) -> str:
    """Say how often ours is slower than any, its geometric mean over the fastest of them, and the worst ten cases."""
    worst = hardest(rows)
    lines = [f"{'':9} {'clock':7} {'cases':>5} {'slower':>6}  geometric mean of ours / the fastest of the others"]
    for kind in KINDS:
        for clock in (DEVICE, CALLER):
            some = [row for row in worst if (row.kind, row.clock) == (kind, clock)]
            if some:
                slower = sum(row.verdict == Verdict.SLOWER for row in some)
                mean = statistics.geometric_mean(row.ratio for row in some)
                lines.append(f"{kind:9} {clock:7} {len(some):5} {slower:6}  {mean:.3f}")
    lines.append("\nthe ten highest ratios")
    for row in sorted(worst, key=lambda row: -row.ratio)[:10]:
        lines.append(
            f"  {row.ratio:.3f} [{row.low:.3f}, {row.high:.3f}] {row.verdict:7} {row.kind}, {row.clock}, {row.tokens} "
            f"tokens, {row.hidden} x {row.intermediate}: {row.ours_ms:.4g} ms, {row.against} {row.theirs_ms:.4g} ms"
        )
    for note in sorted({f"{row.against}, {row.kind}: {row.note}" for row in rows if row.note}):
        lines.append(f"  no ratio to {note}")
    return "\n".join(lines)


def picture(rows: Sequence[Row]) -> Any:
    """Draw ours / the fastest of the others over the tokens, a panel for each clock; crosses: ours is slower."""
    import altair as alt

    from swiglu_bench.charts.style import HEIGHT, PALETTE, WIDTH

    values = [
        {"tokens": row.tokens, "ratio": row.ratio, "kind": row.kind, "clock": row.clock}
        | {"outcome": OUTCOMES[row.verdict == Verdict.SLOWER]}
        for row in hardest(rows)
    ]
    marks = alt.Scale(domain=OUTCOMES, range=["circle", "cross"])
    machines = ", ".join(sorted({row.machine for row in rows}))

    def panel(clock: str, what: str) -> Any:
        points = alt.Chart(alt.Data(values=[one for one in values if one["clock"] == clock])).encode(
            x=alt.X("tokens:Q", title="tokens in a call, log scale", scale=alt.Scale(type="log", base=2)),
            y=alt.Y("ratio:Q", title="time of ours / of the fastest", scale=alt.Scale(zero=False)),
            color=alt.Color("kind:N", title=None, sort=list(KINDS), scale=alt.Scale(range=list(PALETTE[2:5]))),
            shape=alt.Shape("outcome:N", title=None, scale=marks),
            size=alt.condition(alt.datum.outcome == OUTCOMES[1], alt.value(90), alt.value(24)),
        ).mark_point(filled=True)  # fmt: skip
        one = alt.Chart(alt.Data(values=[{"one": 1}])).mark_rule(strokeDash=[4, 3]).encode(y="one:Q")
        title = alt.TitleParams(what, fontSize=12, fontWeight="normal", frame="group")
        return alt.layer(one, points).properties(width=WIDTH, height=HEIGHT, title=title)

    title = alt.TitleParams("ours against the fastest of eager, torch.compile and Liger", subtitle=machines)
    panels = panel(DEVICE, "GPU time behind a filled queue"), panel(CALLER, "as a caller feels it, calls in a row")
    return alt.vconcat(*panels).properties(title=title)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, nargs="+", required=True, help="the first is added to, or made")
    parser.add_argument("--picture", type=Path, help="measure nothing; draw STEM.png and STEM.svg")
    parser.add_argument("--part", default="1/1", help="I/N: every N-th layer, from the I-th on")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after so long")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds at most for the rounds of each clock")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--against", nargs="+", choices=RIVALS, default=list(RIVALS))
    parser.add_argument("--static", action="store_true", help="compile anew for each number of tokens")
    parser.add_argument("--shapes", default=MODELS)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--most-tokens", type=int, default=16384)
    parser.add_argument("--dtype", choices=sorted(DTYPE_ALIASES), default="bf16")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    part, _, parts = options.part.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        parser.error(f"--part: expected I/N with 1 <= I <= N, such as 1/4, got {options.part!r}")
    options.part, options.parts = int(part), int(parts)
    if options.cases > options.most_tokens:
        parser.error(f"--cases: expected at most --most-tokens={options.most_tokens}, got {options.cases}")
    if options.picture and (missing := next((file for file in options.csv if not file.exists()), None)):
        parser.error(f"--csv: {missing} does not exist, and --picture measures nothing")
    return options


def run(options: argparse.Namespace) -> None:
    """Measure what the files lack, and keep each case when it is done."""
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    clock, began = make_clock(device), time.monotonic()
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    machine += f", torch {torch.__version__}, triton {triton.__version__}"
    rule = Rule(warmup_rounds=2, min_s=0.05, budget_s=options.budget)
    rows = read(options.csv[:1])
    done = {row.case for row in rows + read(options.csv[1:])}
    drawn = draw(load_shapes(options.shapes), options.cases, options.most_tokens, options.seed)
    for layer in list(drawn)[options.part - 1 :: options.parts]:
        torch._dynamo.reset()  # or the next layer's sizes would become dynamic as well
        shape = Shape("x".join(map(str, layer)), *layer, source="", tokens=())
        for tokens in drawn[layer]:
            for kind in options.kinds:
                scope, mode = KINDS[kind]
                like = Row(*layer, tokens, kind, "", "", machine=machine)
                if like.case in done:
                    continue
                if time.monotonic() - began > options.seconds:
                    print(f"not all of it: {options.seconds:g} seconds are over; the same command goes on", flush=True)
                    return
                if options.static:
                    torch._dynamo.reset()
                case = Case(shape, tokens, DTYPE_ALIASES[options.dtype], scope, mode)
                chosen = contenders(kind, options.against, options.static)
                new = measure(like, chosen, make_problem(case, device, seed=1), clock, rule)
                rows += new
                write(options.csv[0], rows)
                print(case.label, *(f"{row.clock} {row.against} {row.ratio:.3f}" for row in new), sep="  ", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or draw; then say how it stands."""
    options = parsed(arguments)
    if options.picture:
        from swiglu_bench.charts.export import save

        print(save(options.picture.parent, options.picture.name, lambda: picture(read(options.csv))))
    else:
        run(options)
    print(summary(read(options.csv)))


if __name__ == "__main__":
    main()
