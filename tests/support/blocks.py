"""Operands of operations with gate and up weights, and the comparison of such an operation with its definition."""

import functools
import inspect
import itertools
from typing import Any

import torch
from accuracy import check_against_reference, random_tensor
from clamped import GPT_OSS, keep_off_limit

import swiglu_kernels
from swiglu_kernels import reference
from swiglu_kernels.ops.glu.choice import INPUT_GRADS, SAVES, WEIGHT_GRADS

GATES: dict[str, dict[str, Any]] = {
    "silu": {},
    "gpt-oss": GPT_OSS,
    "falcon-h1": {"gate_multiplier": 0.7},
    "gelu": {"activation": "gelu_tanh"},
    "step-3.7": {"activation": "silu_clamp", "limit": 1.0},
    "inkling-2": {"activation": "silu_softcap", "limit": (1.0, 2.0)},
    "inkling-2, all at once": {
        "activation": "silu_softcap",
        "gate_multiplier": -1.5,
        "limit": (4.0, 25.0),
        "up_offset": 1.0,
    },
    "gelu, all at once": {"activation": "gelu_tanh", "gate_multiplier": -1.5, "limit": 0.5, "up_offset": -0.25},
}
WITH_AUTO = [
    dict(zip(("weight_grad", "save", "input_grad"), values, strict=True))
    for values in itertools.product(WEIGHT_GRADS, SAVES, INPUT_GRADS)
]


def variant_name(options: dict[str, Any]) -> str:
    return "-".join(map(str, options.values())) or "default"


def problem(
    tokens: int, hidden: int, intermediate: int, hidden_out: int | None = None, dtype: torch.dtype = torch.float32,
    layouts: tuple[str, ...] = ("contiguous",) * 4, biased: bool = False,
) -> list[torch.Tensor]:  # fmt: skip
    """Draw x and weights with values around 1 on the way, and biases, those of gate and up two elements apart."""
    shapes = [(tokens, hidden), (intermediate, hidden), (intermediate, hidden)]
    shapes += [] if hidden_out is None else [(hidden_out, intermediate)]
    drawn = [
        random_tensor(*shape, dtype=dtype, layout=layout, scale=max(shape[1], 1) ** -0.5 if seed else 1.0, seed=seed)
        for seed, (shape, layout) in enumerate(zip(shapes, layouts, strict=False))
    ]
    if biased:
        drawn += [random_tensor(2 * intermediate, dtype=dtype, seed=4 + part)[part::2] for part in (0, 1)]
        drawn += [] if hidden_out is None else [random_tensor(hidden_out, dtype=dtype, seed=6)]
    return drawn


def leaves(*shape: int, biased: bool = False) -> list[torch.Tensor]:
    return [tensor.clone().requires_grad_() for tensor in problem(*shape, biased=biased)]


def check(
    name: str, inputs: list[torch.Tensor], options: dict[str, Any], gate: dict[str, Any] | None = None,
    **defined: Any,
) -> None:  # fmt: skip
    """Compare a public function with its definition, which takes the gate and `defined` too."""
    function, gate = getattr(swiglu_kernels, name), gate or {}
    names = list(inspect.signature(function).parameters)[: len(inputs)]
    given = dict(zip(names, inputs, strict=True))
    if "w_gate_up" in given:
        turned = defined["layout"] == "transposed"
        weights = [given["w_gate_up"].T if turned else given["w_gate_up"]]
        biases = inputs[2:]
    else:
        weights = [given["w_gate"], given["w_up"]]
        biases = [given[bias] for bias in ("bias_gate", "bias_up") if bias in given]
    keep_off_limit(gate, given["x"], weights, biases)
    check_against_reference(
        " ".join(names),
        functools.partial(function, **gate, **options, **defined),
        functools.partial(getattr(reference, name), **gate, **defined),
        inputs,
        wanted=[0] if options.get("weight_grad") == "none" else None,
    )
