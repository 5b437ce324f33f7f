"""One call of every kernel at sizes that no tile divides, against fp64: for a new GPU, a new Triton, a sanitizer.

    python -m swiglu_kernels.standalone.odd_sizes [--few]
    compute-sanitizer --tool memcheck python -m swiglu_kernels.standalone.odd_sizes --few
    compute-sanitizer --tool initcheck python -m swiglu_kernels.standalone.odd_sizes --few --portable

Outputs lie between rows that nothing may touch. They and all else that is allocated begin as NaN, so that what is read
and was never written shows. A line per kernel; exits 1 if one of them is wrong. Hand-scheduled kernels run on Hopper
whatever the version of Triton. initcheck does not see what TMA stores, and takes it for never written: there the
portable kernels run alone, in memory as it comes.
"""

import argparse
import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from swiglu_kernels import reference
from swiglu_kernels.hopper import admission, shared
from swiglu_kernels.ops.experts import exchange
from swiglu_kernels.ops.experts.choice import MOST_TOKENS
from swiglu_kernels.ops.experts.operation import swiglu_experts
from swiglu_kernels.ops.fp8 import hopper_fp8
from swiglu_kernels.ops.fp8.operation import why_not as why_no_fp8
from swiglu_kernels.ops.fp8.portable_codes import laid, new_scales
from swiglu_kernels.ops.gate.definition import gate_mul
from swiglu_kernels.ops.gate.formula import PLAIN, Formula
from swiglu_kernels.ops.glu import hopper_forward
from swiglu_kernels.runtime.backend import capability_of, triton
from swiglu_kernels.standalone import hazards
from swiglu_kernels.standalone.covering import TITLES
from swiglu_kernels.standalone.workloads import DENSE, LayerTensors, by_hand, dense_shapes

ROUNDINGS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}
"""In fp32, the sums themselves are rounded hundreds of times; longer ones have more, see `Sizes.rounding`."""
DTYPES = tuple(ROUNDINGS)
SLACK = 4
"""Roundings that a value may be off by: of what was stored before, of the operands that were made, of the result."""
MARGIN = 16
CLAMPED = Formula(alpha=1.702, limit=1.0, up_offset=1.0)
PORTABLE = [(1, 72, 200), (16, 51, 83), (37, 200, 136), (131, 72, 264), (9, 2056, 40)]
BY_HAND = [(131, 72, 200), (517, 264, 1032), (300, 1032, 136)]
OF_FP8 = [(131, 80, 224), (517, 272, 1056), (9, 400, 96)]
OF_EXCHANGE = [(9, 2056, 40), (37, 200, 136)]
OF_EXPERTS = [(261, 192, 256), (517, 1088, 448)]
FEW_TOKENS = [(1, 72, 200), (17, 264, 1032), (77, 136, 2880), (128, 520, 3000)]
OF_PRECISIONS = {"experts": "bf16", "fp8 experts": "fp8-rowwise"}
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    """How far the worst output of a launch is from fp64, in roundings of its dtype."""

    name: str
    roundings: float
    reason: str = ""

    @property
    def right(self) -> bool:
        """Whether that is what rounding explains, and nothing else was written."""
        return not self.reason and self.roundings <= SLACK


class Sizes(LayerTensors):
    """The tensors of one size and dtype: inputs, and outputs between margins, which begin as NaN or as others."""

    def __init__(self, size: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dense_shapes(*size), self.new)
        self.dtype, self.device, self.longest = dtype, device, max(size)
        source = torch.Generator().manual_seed(size[0])
        for name in ("x", "d_out", "w_gate", "w_up", "w_down", "gate", "up", "dz"):
            drawn = torch.randn(self._shapes[name], generator=source)
            scale = drawn.shape[1] ** -0.5 if name.startswith("w_") else 1.0
            setattr(self, name, (drawn * scale).to(dtype).to(device))
        self.start: dict[str, torch.Tensor] = {}
        """What outputs begin as, by name; NaN without."""
        self.buffers: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def new(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """An output; there are no biases."""
        if name.startswith("bias"):
            return None
        like = self.start.get(name)
        dtype = self.dtype if like is None else like.dtype
        made = torch.full((shape[0] + 2 * MARGIN, shape[1]), float("nan"), dtype=dtype)
        inner = slice(MARGIN, MARGIN + shape[0])
        if like is not None:
            made[inner] = like.cpu()
        buffer = made.to(self.device)
        self.buffers[name] = buffer, buffer[inner]
        return buffer[inner]

    def rounding(self, dtype: torch.dtype) -> float:
        """One rounding of an output; in fp32 that of a sum, whose error grows with the square root of its length."""
        return max(ROUNDINGS[dtype], self.longest**0.5 * 2.0**-24)

    def judged(self, name: str, exact: Tensors) -> Outcome:
        """Compare what was written; outputs without an exact value are not."""
        worst, written = 0.0, self.buffers
        self.buffers = {}
        for output, (buffer, got) in written.items():
            vars(self).pop(output, None)
            buffer = buffer.cpu()
            if not (buffer[:MARGIN].isnan().all() and buffer[-MARGIN:].isnan().all()):
                return Outcome(name, float("nan"), f"{output}: rows before or behind it were written")
            if (named := output.removesuffix("_made")) in exact:
                error = (fp64(got) - exact[named]).abs()
                if not error.isfinite().all():
                    return Outcome(name, float("nan"), f"{output}: {int((~error.isfinite()).sum())} are not finite")
                size = exact[named].abs() + exact[named].square().mean().sqrt()
                worst = max(worst, float((error / size).max()) / self.rounding(got.dtype))
        return Outcome(name, worst)


def fp64(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU: what is exact needs no kernel of others, which a sanitizer would watch as well."""
    return tensor.cpu().double()


def gradients(dz: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, formula: Formula) -> Tensors:
    """What fp64 says of d_gate, d_up and h."""
    gate, up = fp64(gate).requires_grad_(), fp64(up).requires_grad_()
    h = gate_mul(gate, up, **formula.options)
    d_gate, d_up = torch.autograd.grad(h, (gate, up), fp64(dz))
    return {"d_gate": d_gate, "d_up": d_up, "h": h.detach()}


@contextlib.contextmanager
def allocated_as_nan() -> Iterator[None]:
    """While this is entered, PyTorch fills what it allocates with NaN, and integers with their largest value."""
    memory: Any = torch.utils.deterministic
    enabled, fills = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        memory.fill_uninitialized_memory = fills


Case = Callable[[], Iterator[Outcome]]
"""What launches some kernels at one size."""


def outcomes(
    device: torch.device, few: bool = False, dtypes: Sequence[torch.dtype] = DTYPES, portable: bool = False,
    share: tuple[int, int] = (0, 1),
) -> Iterator[Outcome]:  # fmt: skip
    """Launch everything once for each size and dtype.

    few: at one or two sizes, in fp16.
    portable: no hand-scheduled kernel, and memory as it comes.
    share: (i, n) for every n-th size, from the i-th on.
    """
    first, step = share
    dtypes = [torch.float16] if few else dtypes
    cases: list[tuple[str | None, Case]] = [
        ("portable kernels are asked for", case) for case in _portable_cases(device, dtypes, few)
    ]
    capability = capability_of(device)
    if not portable and shared.GLUON_MISSING is None and capability is not None and capability[0] == 9:
        for kernel in admission.KERNELS:
            cases += [(None, case) for case in by_hand_cases(kernel, device, dtypes, few)]
    with contextlib.nullcontext() if portable else allocated_as_nan():
        for aside, case in cases[first::step]:
            with admission.by_hand_aside(aside):
                yield from case()


def _at(
    size: tuple[int, int, int], dtype: torch.dtype, device: torch.device, kernels: Callable[..., Iterator[Outcome]]
) -> Iterator[Outcome]:
    yield from kernels(Sizes(size, dtype, device), f"{size} {str(dtype).removeprefix('torch.')}")


def _portable_cases(device: torch.device, dtypes: Sequence[torch.dtype], few: bool) -> Iterator[Case]:
    """Yield what launches the portable kernels of one kind at one size."""
    for size, dtype in itertools.product(PORTABLE[1:4:2] if few else PORTABLE, dtypes):
        yield partial(_at, size, dtype, device, _portable)
        yield partial(_experts, size, dtype, device, "portable")
    for size, dtype in itertools.product(OF_EXCHANGE[:1] if few else OF_EXCHANGE, dtypes):
        yield partial(_at, size, dtype, device, _exchange)
    if why_no_fp8(device) is None:
        halves = [dtype for dtype in dtypes if dtype.itemsize == 2]
        for size, dtype in itertools.product(OF_FP8[:1] if few else OF_FP8, halves):
            yield partial(_experts, size, dtype, device, "portable", "fp8-rowwise")


def by_hand_cases(kernel: str, device: torch.device, dtypes: Sequence[torch.dtype], few: bool) -> Iterator[Case]:
    """Yield what launches a kernel of `admission.KERNELS`, in each of its forms, at one size."""
    halves = [dtype for dtype in dtypes if dtype.itemsize == 2]
    if kernel in OF_PRECISIONS:
        for size, dtype in itertools.product(OF_EXPERTS[:1] if few else OF_EXPERTS, halves):
            yield partial(_experts, size, dtype, device, "hopper", OF_PRECISIONS[kernel])
        return
    sizes = {"row forward": FEW_TOKENS, "fp8 forward": OF_FP8}.get(kernel, BY_HAND)
    launches = _fp8_by_hand if kernel == "fp8 forward" else partial(_by_hand, kernel)
    most = (2 if kernel == "row forward" else 1) if few else None
    for size, dtype in itertools.product(sizes[:most], halves):
        yield partial(_at, size, dtype, device, launches)


def _experts(
    size: tuple[int, int, int], dtype: torch.dtype, device: torch.device, backend: str, precision: str = "bf16"
) -> Iterator[Outcome]:
    """A mixture of five experts, of which one has no token; whole calls, whose outputs they allocate themselves."""
    tokens, hidden, intermediate = size
    source = torch.Generator().manual_seed(tokens)
    sizes = (tokens, hidden), (5, 2 * intermediate, hidden), (5, hidden, intermediate), (tokens, 3)
    drawn = [(torch.randn(shape, generator=source) * shape[-1] ** -0.5).to(dtype) for shape in sizes]
    index = torch.randint(-1, 4, (tokens, 3), generator=source)
    d_out = torch.randn(tokens, hidden, generator=source).to(dtype)

    def run(
        function: Callable[..., torch.Tensor], dtype: torch.dtype, at: str | torch.device = "cpu", **options: object
    ) -> Tensors:
        leaves = [leaf.to(dtype).to(at).requires_grad_() for leaf in drawn]
        out = function(*leaves[:3], index.to(at), leaves[3], precision=precision, **options)
        found = torch.autograd.grad(out, leaves, d_out.to(dtype).to(at))
        return dict(zip(("out", "d_x", "d_w_gate_up", "d_w_down", "d_weights"), (out.detach(), *found), strict=True))

    exact, eager = run(reference.swiglu_experts, torch.float64), run(reference.swiglu_experts, dtype)
    found = run(swiglu_experts, dtype, device, backend=backend)
    if backend == "portable" and precision == "bf16":
        few = slice(0, MOST_TOKENS)
        x, w_gate_up, w_down, weights = (leaf.to(device) for leaf in drawn)
        with torch.no_grad():
            found["out of few pairs"] = swiglu_experts(x[few], w_gate_up, w_down, index[few].to(device), weights[few])
        for outs in (exact, eager):
            outs["out of few pairs"] = outs["out"][few]
    for name, got in found.items():
        error, allowed = ((fp64(result) - exact[name]).norm() / exact[name].norm() for result in (got, eager[name]))
        # The operands of a gradient are results that were rounded: eager's own loss says what that costs.
        roundings = float(error / (allowed + ROUNDINGS[dtype]))
        label = f"{backend} {size} {precision if precision != 'bf16' else ''} {str(dtype).removeprefix('torch.')}"
        yield Outcome(f"experts {name} {' '.join(label.split())}", roundings)


def _exchange(at: Sizes, label: str) -> Iterator[Outcome]:
    """Rows to the ranks with any of their experts and back, where they are added; the memory of all ranks is here."""
    (tokens, columns), source = at.x.shape, torch.Generator().manual_seed(at.longest)
    counts = tokens, 0, (tokens + 1) // 2
    sizes = [exchange.RankSizes(len(counts), rank, experts=2, most=tokens, slots=3) for rank in range(len(counts))]
    x = [given[:count] for given, count in zip((at.x, at.x, at.d_out), counts, strict=True)]
    weights = [torch.rand(count, 3, generator=source).to(at.dtype).to(at.device) for count in counts]
    index = [torch.randint(8, (count, 3), generator=source).to(at.device) for count in counts]  # 6 and 7 are nobody's

    def new(name: str, width: int, *rows: int) -> list[Any]:
        return [at.new(f"{name} {rank}", (count, width)) for rank, count in enumerate(rows)]

    def ids(rows: int) -> list[torch.Tensor]:
        return [torch.full((rows, 3), -9, dtype=torch.int32).to(at.device) for _ in counts]

    def table(of: list[torch.Tensor]) -> torch.Tensor:
        return torch.tensor([tensor.data_ptr() for tensor in of]).to(at.device)

    copy: Callable[..., Any] = exchange.copy_launch
    every, index_out, kept = [size.rows for size in sizes], ids(tokens), ids(sizes[0].rows)
    published, values = new("published", columns, *[tokens] * 3), new("values", 3, *[tokens] * 3)
    came, again, results = (new(name, columns, *every) for name in ("came", "again", "results"))
    beside, sums = new("beside", 3, *every), new("sums", 3, *every)
    out, weights_out = new("out", columns, *counts), new("weights", 3, *counts)
    for rank, size in enumerate(sizes):
        given = x[rank], index[rank], weights[rank]
        copy(exchange.PUBLISH, columns, *given, published[rank], index_out[rank], values[rank], size).run()
    for rank, size in enumerate(sizes):
        far = table(published), table(index_out), table(values)
        copy(exchange.FETCH, columns, *far, came[rank], kept[rank], beside[rank], size).run()
        copy(exchange.FETCH_AGAIN, columns, far[0], kept[rank], None, again[rank], None, None, size).run()
        back = again[rank], kept[rank], beside[rank], results[rank], None, sums[rank]
        copy(exchange.RETURN, columns, *back, size).run()
    exact = {}
    for rank, size in enumerate(sizes):
        made = out[rank], weights_out[rank]
        exchange.add_launch(came[rank], table(results), index[rank], beside[rank], table(sums), *made, size).run()
        owner = index[rank].cpu() // 2
        times = sum((owner == other).any(1, keepdim=True).double() for other in range(3))
        if counts[rank]:
            exact[f"out {rank}"] = fp64(x[rank]) * times
            exact[f"weights {rank}"] = fp64(weights[rank]) * (owner < 3)
    yield at.judged(f"experts' exchange {label}", exact)


def _fp8_by_hand(at: Sizes, label: str) -> Iterator[Outcome]:
    for recipe in reference.RECIPES:
        blocks, operands, exact = recipe == "blockwise", [], []
        for matrix in (at.x, at.w_gate, at.w_up):
            codes, scales = reference.quantise(matrix.cpu(), recipe, matrix is not at.x)
            exact.append(reference.dequantise(codes, scales))
            scales = scales.to(at.device)
            scales = laid(scales, matrix is not at.x) if blocks else scales
            operands.append((codes.view(at.dtype).to(at.device), scales))
        made, (x, w_gate, w_up) = forward_of(*exact), operands
        widths = hopper_fp8.BLOCK_COLUMNS if blocks else hopper_forward.COLUMNS
        for columns, stored in itertools.product(widths, (False, True)):
            z, kept = at.z, at.kept if stored else None
            hopper_fp8.forward_launch(x, w_gate, w_up, z, kept, hopper_fp8.tile_of(columns, blocks)).run()
            name = f"fp8 {recipe} forward of {columns} {label}{', stored' if stored else ''}"
            z = z.cpu()
            yield at.judged(name, made)
            if columns == hopper_fp8.BLOCK:
                yield _fp8_codes_by_hand(at, operands, z, made, stored, f"{name}, h in fp8")


def _fp8_codes_by_hand(
    at: Sizes, operands: list[hopper_fp8.Operand], z: torch.Tensor, made: Tensors, stored: bool, name: str
) -> Outcome:
    """Codes and scales of h, bit for bit those of the z that the same tile stores."""
    tokens, intermediate = at.dz.shape
    buffer = torch.full((tokens + 2 * MARGIN, intermediate), 127, dtype=torch.uint8, device=at.device)  # NaN
    codes = buffer[MARGIN:-MARGIN].view(torch.float8_e4m3fn)
    scales = new_scales(codes, tokens, intermediate, True).fill_(float("nan"))
    x, w_gate, w_up = operands
    hopper_fp8.forward_launch(x, w_gate, w_up, (codes, scales), at.kept if stored else None).run()
    defined, of_rows = reference.quantise(z, "blockwise")
    outcome = at.judged(name, made)
    wrong = int((codes.cpu().view(torch.uint8) != defined.view(torch.uint8)).sum())
    if wrong or not torch.equal(scales.cpu(), of_rows):
        return replace(outcome, reason=f"{wrong} codes, or their scales, are not those of h")
    if not bool((buffer[:MARGIN] == 127).all() and (buffer[-MARGIN:] == 127).all()):
        return replace(outcome, reason="rows before or behind the codes were written")
    return outcome


def forward_of(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> Tensors:
    """What fp64 says of a forward."""
    gate, up = x @ w_gate.t(), x @ w_up.t()
    return {"kept_gate": gate, "kept_up": up, "z": gate_mul(gate, up, **PLAIN.options)}


def _exact(kernel: str, at: Sizes, formula: Formula) -> Tensors:
    """What fp64 says of the outputs of a kernel of `workloads.DENSE`."""
    x, w_gate, w_up, gate, up = map(fp64, (at.x, at.w_gate, at.w_up, at.gate, at.up))
    if kernel.startswith("forward"):
        return forward_of(x, w_gate, w_up)
    if kernel == "recompute":  # where gate or up is next to a bound, rounding decides on its gradient
        return gradients(at.dz, x @ w_gate.t(), x @ w_up.t(), formula) if formula == PLAIN else {}
    if kernel == "mlp-weight-grad":
        return {"d_w_down": fp64(at.d_out).t() @ gate}
    if kernel == "mlp-hidden-grad":
        return gradients(fp64(at.d_out) @ fp64(at.w_down), at.gate, at.up, formula)
    made = gradients(at.dz, at.gate, at.up, formula)
    left = (made["d_gate"], made["d_up"]) if kernel.endswith("fused") else (gate, up)
    if kernel.startswith("input-grad"):
        return {"dx": left[0] @ w_gate + left[1] @ w_up}
    if kernel.startswith("weight-grad"):
        return {"d_w_gate": left[0].t() @ x, "d_w_up": left[1].t() @ x}
    return made


_OF_FORMULAS = ["recompute", "input-grad-fused", "weight-grad-fused", "mlp-hidden-grad"]


def _portable(at: Sizes, label: str) -> Iterator[Outcome]:
    for kernel, formula in itertools.product(DENSE, (PLAIN, CLAMPED)):
        if formula != PLAIN and not (kernel in _OF_FORMULAS or kernel.startswith("silu_mul backward")):
            continue
        name = f"{TITLES.get(kernel, kernel)} {label}{'' if formula == PLAIN else ' clamped'}"
        exact, read = _exact(kernel, at, formula), {"gate": at.gate, "up": at.up, "dz": at.dz}
        if kernel == "mlp-hidden-grad":  # in place
            at.start = {"d_gate": at.gate, "d_up": at.up}
            vars(at).update(gate=at.d_gate, up=at.d_up)
        elif kernel == "unsloth backward":  # writes h, d_up and d_gate over what it reads
            at.start = {"h_made": at.dz, "d_up": at.gate, "d_gate": at.up}
            vars(at).update(dz=at.h_made, gate=at.d_up, up=at.d_gate)
        at.formula = formula
        at.launch(kernel).run()
        vars(at).update(read)
        at.start = {}
        yield at.judged(name, exact)


def _by_hand(kernel: str, at: Sizes, label: str) -> Iterator[Outcome]:
    of = {"dX": "input-grad", "dW": "weight-grad", "hidden gradient": "mlp-hidden-grad"}.get(kernel, "forward")
    exact = _exact(of, at, PLAIN)
    at.start = {"d_gate": at.gate, "d_up": at.up, "sums": at.d_out.cpu().float()}
    if kernel == "dX":
        exact["sums"] = exact["dx"] + fp64(at.start["sums"])
    for name, launch in by_hand(kernel, at):
        launch.run()
        outcome = at.judged(f"{name} {label}", exact)
        # sums of products by tensor cores
        yield replace(outcome, roundings=outcome.roundings / 16) if "added" in name else outcome
    at.start = {}


def main(arguments: list[str] | None = None) -> None:
    """Print a line for each launch, those that are wrong once more at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--few", action="store_true", help="one or two sizes of each, in fp16")
    parser.add_argument("--portable", action="store_true", help="portable kernels, in memory as it comes")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = []
    for outcome in outcomes(device, options.few, portable=options.portable):
        found.append(outcome)
        verdict = "ok   " if outcome.right else "WRONG"
        print(f"{verdict} {outcome.roundings:6.2f} roundings  {outcome.name}  {outcome.reason}", flush=True)
    wrong = [outcome for outcome in found if not outcome.right]
    versions = f"torch {torch.__version__}, Triton {getattr(triton, '__version__', 'none')}"
    print(f"{versions}, {device}: {len(found)} launches, {len(wrong)} wrong")
    print(*(f"{outcome.name}: {outcome.reason or f'{outcome.roundings:.1f} roundings'}" for outcome in wrong), sep="\n")
    hazards.announce()
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
