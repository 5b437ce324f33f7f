"""As few launches as cover every kernel that can be chosen, in every shipped tile and schedule, for a kind of GPU.

What differs in a number alone (a size, a stride, how many row tiles are swept together) is compiled once. Where a
kernel stores more or less, or applies another gate, the form that needs most registers stands for all of them.
"""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from swiglu_kernels.hopper import admission, shared
from swiglu_kernels.ops.experts import exchange, hopper_experts, hopper_fp8_experts, portable_experts, portable_pairs
from swiglu_kernels.ops.experts.portable_gemv import forward_launch as gemv_launch
from swiglu_kernels.ops.experts.routing import combine_launch, gather_launch, new_routing, route_launch, split_launch
from swiglu_kernels.ops.fp8 import hopper_fp8, portable_codes, portable_fp8, portable_gate
from swiglu_kernels.ops.gate.formula import PLAIN, Formula
from swiglu_kernels.ops.glu import hopper_forward, hopper_products, hopper_row
from swiglu_kernels.ops.mlp.parallel import add_launch
from swiglu_kernels.runtime.backend import Capability, describing_for
from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.standalone.workloads import LayerTensors, Make, Shape, by_hand, dense_shapes, mixture

TOKENS = (16, 64, 128, 512, 8192)
"""The ends of the rows of `rules.py`."""
WEIGHTS = ((4096, 11008), (7168, 2048), (2048, 2880), (3584, 18944), (8192, 28672))
"""(hidden, intermediate) that take every tile of few tokens on 132 multiprocessors."""
SOFTCAPPED = Formula("silu_softcap", limit=(4.0, 25.0))
CLAMPED = Formula(alpha=1.702, limit=7.0, up_offset=1.0)
_NUMBERS = {
    "M", "N", "K", "H", "GROUP", "WIDE", "PRECISION", "PARTS", "PAIRS", "CHUNKS", "TILES", "EXPERTS", "TOKENS", "share",
    "columns", "n_elements", "B_ROWS",
}  # fmt: skip


def covering(capability: Capability) -> list[tuple[str, Launch]]:
    """Name and describe them, on meta tensors and for 132 multiprocessors."""
    found: dict[tuple[Any, ...], tuple[str, Launch]] = {}

    def enter(launches: Iterator[tuple[str, Launch]], alike: bool) -> None:
        for name, launch in launches:
            launched: Launch | None = launch
            for part in itertools.count(1):
                if launched is None:
                    break
                kind = _kind(launched) if alike else (name, *_kind(launched))
                found.setdefault(kind, (name if part == 1 else f"{name}, launch {part}", launched))
                launched = launched.then

    with admission.by_hand_aside("portable kernels are asked for"), describing_for(capability):
        for launches in (_portable(), _experts(capability), _fp8(capability), _fp8_experts(capability)):
            enter(launches, alike=True)
    if capability[0] == 9 and shared.GLUON_MISSING is None:
        enter(_by_hand(), alike=False)
    return list(found.values())


def most_demanding(launches: list[tuple[str, Launch]]) -> list[tuple[str, Launch]]:
    """Of each kernel, in each data type, the launches that spill first, in each value of what its constants choose.

    Those with the most elements per thread come first, then those with the most operands, then those for more tokens.
    """
    met: set[Any] = set()
    found = []
    for name, launch in sorted(launches, key=lambda named: _demand(named[1]))[::-1]:
        kernel, dtypes, *_, compiled_in = _kind(launch)
        kernel += ", softcapped" * (("FORMULA", SOFTCAPPED.activation) in compiled_in)  # the longest of the formulas
        choices = {(name, value) for name, value in compiled_in if name != "FORMULA" and type(value) is not int}
        new = {(kernel, dtypes, choice) for choice in (None, *choices)} - met
        if new:
            found.append((name, launch))
        met |= new
    return found


def _demand(launch: Launch) -> tuple[float, int]:
    sizes = [size for name, size in launch.arguments.items() if re.match("BLOCK|COLUMNS|ROWS|TILE|OUTPUTS|TERMS", name)]
    operands = sum(value is not None for value in launch.arguments.values())
    return math.prod(size for size in sizes if size) / launch.num_warps, operands


def _kind(launch: Launch) -> tuple[Any, ...]:
    """What decides how a launch is compiled, but for what differs in a number alone."""
    tensors = [getattr(value, "base", value) for value in launch.arguments.values()]
    dtypes = {tensor.dtype for tensor in tensors if isinstance(tensor, torch.Tensor)}
    aligned = all(
        value == 1 or value % 16 == 0 for name, value in launch.arguments.items() if "_" in name and type(value) is int
    )
    compiled_in = frozenset(
        (name, value)
        for name, value in launch.arguments.items()
        if name.isupper() and name not in _NUMBERS and not name.startswith("EVEN")
    )
    return str(launch.kernel), frozenset(dtypes), aligned, launch.num_warps, launch.num_stages, compiled_in


TITLES = {
    "forward-preact": "forward", "recompute": "recompute", "input-grad-fused": "dX on the fly", "input-grad": "dX read",
    "weight-grad-fused": "dW on the fly", "weight-grad": "dW read", "mlp-hidden-grad": "mlp d_gate, d_up, h",
    "mlp-weight-grad": "mlp dW_down",
}  # fmt: skip
"""What the matrix kernels of `workloads.DENSE` are called here."""
_CLAMPED = {"forward-preact", "recompute", "mlp-hidden-grad", "silu_mul backward", "silu_mul backward, h"}
_ROUTED = {
    "experts-gate-up": "gate and up", "experts-down": "down", "experts-input-grad": "d_x",
    "experts-hidden-grad": "d_pre", "experts-weight-grad": "dW", "experts-down-weight-grad": "dW_down",
}  # fmt: skip


def meta(
    dtype: torch.dtype = torch.bfloat16, aligned: bool = True,
    apart: Sequence[str] = ("x", "d_out", "w_gate", "w_up", "w_down", "d_w_gate", "d_w_up", "d_w_down"),
    added: bool = False,
) -> Make:  # fmt: skip
    """Return what makes tensors without memory; where they are not aligned, the rows of those in `apart` lie apart.

    `added`: gradients of weights are fp32, and added to.
    """

    def make(name: str, shape: Shape) -> torch.Tensor:
        if name == "sums" or (added and name.startswith("d_w")):
            return torch.empty(shape, dtype=torch.float32, device="meta")
        columns = shape[-1] + (not aligned and name in apart)
        return torch.empty(*shape[:-1], columns, dtype=dtype, device="meta")[..., : shape[-1]]

    return make


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Make a tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


fp32, int32, codes = (partial(tensor, dtype=dtype) for dtype in (torch.float32, torch.int32, torch.float8_e4m3fn))


def _dense(tokens: int, hidden: int, intermediate: int, make: Make | None = None, **more: Any) -> LayerTensors:
    return LayerTensors(dense_shapes(tokens, hidden, intermediate), make or meta(), **more)


def _portable() -> Iterator[tuple[str, Launch]]:
    cases = [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, True)]
    for (dtype, aligned), tokens, sizes in itertools.product(cases, TOKENS, WEIGHTS):
        operands = _dense(tokens, *sizes, meta(dtype, aligned))
        at = f"{tokens} tokens, {str(dtype).removeprefix('torch.')}{'' if aligned else ', unaligned'}"
        for kernel, name in TITLES.items():
            operands.formula = CLAMPED if kernel in _CLAMPED else PLAIN
            yield f"{name}, {at}", operands.launch(kernel)
    operands = _dense(8192, 4096, 11008, meta(added=True))
    for kernel in ("weight-grad", "weight-grad-fused", "mlp-weight-grad"):
        yield f"{TITLES[kernel]}, added", operands.launch(kernel)
    operands = _dense(512, 4096, 11008, formula=CLAMPED)
    yield "dX on the fly, clamped", operands.launch("input-grad-fused")
    yield "dW on the fly, clamped", operands.launch("weight-grad-fused")
    operands.formula = SOFTCAPPED
    for kernel in ("forward-preact", "mlp-hidden-grad"):
        yield f"{TITLES[kernel]}, softcapped", operands.launch(kernel)
    operands.formula = CLAMPED
    for kernel in ("silu_mul", "silu_mul backward", "silu_mul backward, h", "unsloth", "unsloth backward"):
        yield kernel, operands.launch(kernel)
    own = tensor(512, 4096)
    yield "sum over ranks", add_launch(own, tensor(4096, 4096), torch.empty_like(own), 8, 3)


def _scales(rows: int, depth: int, weight: bool, blocks: bool) -> torch.Tensor:
    """Of codes by rows, or by blocks."""
    return portable_codes.new_scales(fp32(), rows, depth, blocks, weight)


def _fp8(capability: Capability) -> Iterator[tuple[str, Launch]]:
    if capability < (8, 9):
        return
    hidden, intermediate = 4096, 11008
    for tokens, recipe in itertools.product((16, 64, 8192), ("rowwise", "blockwise")):
        blocks = recipe == "blockwise"

        def operand(rows: int, depth: int, weight: bool = False, blocks: bool = blocks) -> portable_codes.Quantised:
            return portable_codes.Quantised(codes(rows, depth), _scales(rows, depth, weight, blocks))

        x, weight, h = operand(tokens, hidden), operand(intermediate, hidden, True), operand(tokens, intermediate)
        z, out, bias = tensor(tokens, intermediate), tensor(tokens, hidden), tensor(intermediate)
        turned = operand(hidden, intermediate, True)
        glu = (z, z), (bias, bias), CLAMPED
        launches: dict[str, Launch] = {
            "glu": portable_fp8.glu_launch(x, weight, weight, z, None, *glu),
            "d_gate, d_up, h": portable_fp8.hidden_grad_launch(x, weight, (z, z), z, z, z, CLAMPED),
            "dX": portable_fp8.sum_launch(h, turned, (h, turned), out, bias),
        }
        if blocks:
            launches["glu, h in fp8"] = portable_fp8.glu_launch(x, weight, weight, h.codes, h.scales, *glu)
        if tokens == 8192:
            d_w = operand(intermediate, tokens), operand(hidden, tokens), None, tensor(intermediate, hidden)
            launches["dW"] = portable_fp8.sum_launch(*d_w, None)
            amax = int32(tokens), int32(hidden)
            maxima: Any = (None, None) if blocks else amax
            across, words = operand(hidden, tokens), int32(hidden, tokens // 4)
            launches["quantisation along both"] = portable_codes.tiles_launch(
                out, x.codes, x.scales, words, across.scales, maxima[0], maxima[1], False
            )
            of_z = int32(tokens), int32(intermediate)
            found: Any = ((None, None),) * 3 if blocks else (of_z, of_z, (None, of_z[1]))
            scales: Any = (None, None) if blocks else (fp32(tokens), fp32(intermediate))
            given = z, scales, (z, z), z, z, z, found
            launches["gradients of the gate"] = portable_gate.gradients_launch(*given, CLAMPED)
            if blocks:
                first, second = operand(tokens, hidden, True), operand(hidden, tokens, True)
                launches["gate, h in fp8"] = portable_gate.gate_launch((z, z), *h, CLAMPED)
                launches["quantisation of a weight"] = portable_codes.tiles_launch(
                    out, first.codes, first.scales, words, second.scales, None, None, True
                )
            else:
                launches["sum of two products"] = portable_gate.scaled_sum_launch(z, scales, z, scales)
                launches["largest of rows and columns"] = portable_codes.amax_launch(out, *amax)
                launches["quantisation by rows"] = portable_codes.rows_launch(out, x.codes, x.scales)
        for name, launch in launches.items():
            yield f"fp8 {recipe} {name}, {tokens} tokens", launch


def _exchange(x: torch.Tensor, weights: torch.Tensor, index: torch.Tensor) -> dict[str, Launch]:
    """Between eight ranks."""
    table, size, columns = index.new_empty(8), exchange.RankSizes(8, 3, 16, *index.shape), x.shape[1]
    came, beside = x.new_empty(size.rows, columns), weights.new_empty(size.rows, size.slots)
    ids = index.new_empty(size.rows, size.slots, dtype=torch.int32)
    copies = {
        exchange.PUBLISH: (x, index, weights, x, ids, weights),
        exchange.FETCH: (table, table, table, came, ids, beside),
        exchange.FETCH + exchange.OWN: (table, table, table, came, ids, beside),
        exchange.FETCH_AGAIN: (table, ids, None, came, None, None),
        exchange.RETURN: (came, ids, beside, came, None, beside),
    }  # fmt: skip
    found = {kind: exchange.copy_launch(kind, columns, *given, size) for kind, given in copies.items()}
    found["add"] = exchange.add_launch(came, table, index, beside, table, x, weights, size)
    found["add, copied"] = exchange.add_launch(came, came, index, beside, table, x, weights, size)
    return {f"experts' exchange, {name}": launch for name, launch in found.items()}


def _experts(capability: Capability) -> Iterator[tuple[str, Launch]]:
    cases = [(torch.bfloat16, True, tile_rows, tile_rows == 64, 16) for tile_rows in (16, 32, 64, 128)]
    cases += [(torch.bfloat16, False, 128, True, 16), (torch.bfloat16, True, 128, False, 8)]
    cases += [(torch.float32, True, 16, False, 16), (torch.float32, True, 64, True, 16)]
    slots, count, intermediate = 16, 64, 768
    for dtype, aligned, tile_rows, interleaved, unit in cases:
        sizes = count, 2048 + unit % 16, intermediate
        tokens, gate = tile_rows * 4, (CLAMPED, interleaved)
        index, many = (torch.empty((rows, slots), dtype=torch.int64, device="meta") for rows in (tokens, 8192))
        routing = new_routing(index, count, tile_rows)
        operands = mixture(
            index, routing, sizes, meta(dtype, aligned, ("x", "d_out")), formula=CLAMPED, interleaved=interleaved,
            capability=capability,
        )  # fmt: skip
        at = f"tiles of {tile_rows}, {str(dtype).removeprefix('torch.')}{'' if aligned else ', unaligned'}"
        at += ", interleaved" if interleaved else ", odd multiples of 8" if unit == 8 else ""
        for kernel, name in _ROUTED.items():
            yield f"experts' {name}, {at}", operands.launch(kernel)
        if tile_rows == 128 and aligned and unit == 16:
            added = mixture(index, routing, sizes, meta(added=True), capability=capability)
            for kernel in ("experts-weight-grad", "experts-down-weight-grad"):
                yield f"experts' {_ROUTED[kernel]}, added", added.launch(kernel)
        x, y, weights, b_down = operands.x, operands.y_made, operands.weights, operands.b_down
        if tile_rows == 16:
            pair, row, tile_expert, starts, counts, *_ = routing
            parts = pair, starts, counts, (tile_expert, counts), (tile_expert, starts, counts)
            dots = operands.dots
            for name, launch in {
                "parts of a routing": split_launch(*parts, tokens, capability),
                "routing in one launch": route_launch(index, *routing[:5], tile_rows, capability),
                "routing": route_launch(many, *new_routing(many, count, tile_rows)[:5], tile_rows, capability),
                "experts' gather": gather_launch(x, y, row, starts, counts, slots, tile_rows, capability),
                "experts' bias gradients": portable_experts.row_sums_launch(x, weights, b_down, routing),
                "experts' products of rows": portable_experts.row_dots_launch(x, y, dots, routing),
                "routing weights' gradient": portable_experts.slot_grads_launch(dots, x, b_down, weights, routing),
                "weighted sum": combine_launch(y, weights, row, x, slots, capability),
                **_exchange(x, weights, index),
            }.items():
                yield f"{name}, {at}", launch
        if tile_rows in (16, 32):
            some = x[: 4 if tile_rows == 16 else 32]
            layer = operands.w_gate_up, operands.w_down, weights, operands.b_gate_up, b_down, index[: len(some)]
            pairs = portable_pairs.forward_launch((some, *layer), operands.h, y, some, *gate, capability)
            yield f"pairs, {at}", pairs
    for dtype, interleaved, intermediate, slots in (
        (torch.bfloat16, False, 768, 8), (torch.bfloat16, True, 2880, 4),
        (torch.bfloat16, False, 14336, 2), (torch.float32, True, 768, 8),
    ):  # fmt: skip
        index = torch.empty(1, slots, dtype=torch.int64, device="meta")
        operands = mixture(index, new_routing(index, 8, 16), (8, 2048, intermediate), meta(dtype))
        layer = operands.w_gate_up, operands.w_down, operands.weights, operands.b_gate_up, operands.b_down, index
        given = (operands.x, *layer), operands.h[:slots], operands.x, CLAMPED, interleaved, capability
        name = f"gemv, {slots} slots of {intermediate}, {str(dtype).removeprefix('torch.')}"
        yield name, gemv_launch(*given)


def _fp8_experts(capability: Capability) -> Iterator[tuple[str, Launch]]:
    if capability < (8, 9):
        return
    slots, count, hidden, intermediate = 16, 64, 2048, 768
    for tile_rows, interleaved in itertools.product((16, 32, 64, 128), (False, True)):
        index = torch.empty((tile_rows * 4, slots), dtype=torch.int64, device="meta")
        routing = new_routing(index, count, tile_rows)
        operands = mixture(index, routing, (count, hidden, intermediate), meta())
        of_16_bits = operands.x, operands.w_gate_up, operands.w_down, operands.h
        x, w_gate_up, w_down, h = (codes(*matrix.shape) for matrix in of_16_bits)
        at = f"tiles of {tile_rows}{', interleaved' if interleaved else ''}"
        gated = operands.h_and_pre, routing, operands.b_gate_up, CLAMPED, interleaved, capability
        scales = fp32(len(x)), fp32(count, 2 * intermediate)
        yield f"fp8 experts' gate and up, {at}", portable_experts.gate_up_launch(x, w_gate_up, *gated, scales)
        if not interleaved:
            scales = fp32(len(h)), fp32(count, hidden)
            given = h, w_down, operands.y_made, routing.pair, routing.tile_expert, operands.b_down, capability
            yield f"fp8 experts' down, {at}", portable_experts.rows_launch(*given, scales=scales)
            quantised = portable_codes.rows_launch(operands.h, h, scales[0], routing.starts)
            yield f"fp8 experts' quantisation of h, {at}", quantised
    weight = tensor(count, 2 * intermediate, hidden)
    quantised = portable_codes.rows_launch(weight, codes(*weight.shape), fp32(count, 2 * intermediate))
    yield "fp8 experts' quantisation of a weight", quantised


def _by_hand() -> Iterator[tuple[str, Launch]]:
    yield from by_hand("forward", _dense(8192, 4096, 11008))
    yield from by_hand("transposed forward", _dense(256, 4096, 2112), (1, 2))  # 66 tiles
    # Every width, every number of tokens and both forms, not every combination.
    for number in range(1, hopper_row.MOST_COLUMNS // 8 + 1):
        tokens, columns = (number - 1) % 8 * hopper_row.X_STEP + hopper_row.X_STEP, 8 * number
        _, launch = list(by_hand("row forward", _dense(tokens, 4096, 132 * columns)))[number % 4 > 0]
        yield f"row forward, {tokens} tokens, {columns} columns", launch
    yield from by_hand("dX", _dense(8192, 4096, 11008))
    yield from by_hand("hidden gradient", _dense(8192, 4096, 11008))
    for tokens in (8192, 8208, 8224):
        last = tokens % hopper_products.DEPTH
        for name, launch in by_hand("dW", _dense(tokens, 4096, 11008)):
            yield f"{name}{f', {last} rows left' if last else ''}", launch
    yield from _experts_by_hand()
    yield from _fp8_by_hand()
    yield from _fp8_experts_by_hand()


def _experts_by_hand() -> Iterator[tuple[str, Launch]]:
    count, rows, hidden, intermediate = 128, 8192, 2048, 704  # sizes with columns of tall tiles
    x, h, pre = tensor(rows, hidden), tensor(rows, intermediate), tensor(rows, 2 * intermediate)
    w_gate_up, w_down = tensor(count, 2 * intermediate, hidden), tensor(count, hidden, intermediate)
    pair, starts, counts = (int32(size) for size in (rows, count + 1, count))
    weights, dots = tensor(rows), fp32(-(-intermediate // hopper_experts.WIDE), rows)
    biases = tensor(count, 2 * intermediate), tensor(count, hidden)
    across = tensor(count, hidden, 2 * intermediate).mT
    for slots, interleaved, weight, kept in itertools.product((0, 8), (False, True), (w_gate_up, across), (None, pre)):
        formula, bias = (CLAMPED, biases[0]) if interleaved else (PLAIN, None)
        name = f"experts by hand, h{', gate and up' if kept is not None else ''}"
        name += f"{', interleaved' if interleaved else ''}{', transposed' if weight is across else ''}"
        name += ", rows copied" if slots else ""
        for of_part, begins in (("", starts), (", a part", counts))[: 2 if slots else 1]:
            routed = begins, counts, pair, slots
            given = x, weight, h, kept, routed, bias, formula, interleaved
            yield f"{name}{of_part}", hopper_experts.gate_up_launch(*given)
            if kept is None:
                down = w_down.mT if weight is w_gate_up else w_down.mT.contiguous()
                of_backward = x, down, pre, weights, (pre, h, dots), routed, formula, interleaved
                yield f"{name}{of_part}, backward", hopper_experts.gate_backward_launch(*of_backward)
    yield "experts by hand, y", hopper_experts.rows_launch(h, w_down, x, starts, counts)
    yield "experts by hand, y, a part", hopper_experts.rows_launch(h, w_down, x, counts, counts)
    yield "experts by hand, y, bias", hopper_experts.rows_launch(h, w_down, x, starts, counts, biases[1])
    yield "experts by hand, dx", hopper_experts.rows_launch(pre, w_gate_up.mT, x, starts, counts)
    tokens = tensor(rows // 8, hidden)
    ones = tensor(hopper_experts.BLOCK, hopper_experts.BLOCK)
    for copied, like in itertools.product((False, True), (w_gate_up.mT, across.mT)):
        name = f"experts by hand, dW{' transposed' if like.stride(2) > 1 else ''}{', rows copied' if copied else ''}"
        left = tokens if copied else x
        routed = starts, counts, pair, 8 if copied else 0
        yield name, hopper_experts.weights_launch(left, pre, like, routed)
        yield f"{name}, sums", hopper_experts.weights_launch(left, pre, like, routed, biases[0], ones)


def _fp8_by_hand() -> Iterator[tuple[str, Launch]]:
    tokens, depth, columns = 8192, 4096, 11008
    z, pairs, weights = tensor(tokens, columns), tensor(tokens, depth // 2), tensor(columns, depth // 2)
    for blocks, stored in itertools.product((False, True), (None, (z, z))):
        of_weights = weights, _scales(columns, depth, True, blocks)
        operands = (pairs, _scales(tokens, depth, False, blocks)), of_weights, of_weights
        recipe, kept = "blocks" if blocks else "rows", ", gate and up stored" if stored else ""
        for width in hopper_fp8.BLOCK_COLUMNS if blocks else hopper_forward.COLUMNS:
            launch = hopper_fp8.forward_launch(*operands, z, stored, hopper_fp8.tile_of(width, blocks))
            yield f"fp8 forward by hand, {recipe}, {width} columns{kept}", launch
            if not blocks and stored:
                product = hopper_fp8.forward_launch(*operands, None, stored, hopper_fp8.tile_of(width, blocks))
                yield f"fp8 product by hand, {2 * width} columns", product
        if blocks:
            h = codes(tokens, columns), _scales(tokens, columns, False, True)
            yield f"fp8 forward by hand, h in fp8{kept}", hopper_fp8.forward_launch(*operands, h, stored)


def _fp8_experts_by_hand() -> Iterator[tuple[str, Launch]]:
    count, tokens, slots, hidden, intermediate = 128, 1024, 8, 2048, 768
    rows, both = tokens * slots, 2 * intermediate
    pair, starts, counts = (int32(size) for size in (rows, count + 1, count))
    x, w_gate_up = (tensor(rows, hidden // 2), fp32(tokens)), (tensor(count, both, hidden // 2), fp32(count, both))
    h, pre, bias = tensor(rows, intermediate), tensor(rows, both), tensor(count, both)
    for interleaved, kept in itertools.product((False, True), (None, pre)):
        name = f"fp8 experts by hand, h{', gate and up' if kept is not None else ''}"
        name += ", interleaved" if interleaved else ""
        variant = (bias, CLAMPED, True) if interleaved else (None, PLAIN, False)
        routed = starts, counts, pair, slots
        yield name, hopper_fp8_experts.gate_up_launch(x, w_gate_up, h, kept, routed, *variant)
    w_down, y = (tensor(count, hidden, intermediate // 2), fp32(count, hidden)), tensor(rows, hidden)
    operands = (tensor(rows, intermediate // 2), fp32(rows)), w_down, y, starts, counts
    yield "fp8 experts by hand, y", hopper_fp8_experts.rows_launch(*operands)
    yield "fp8 experts by hand, y, bias", hopper_fp8_experts.rows_launch(*operands, tensor(count, hidden))
