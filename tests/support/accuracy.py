"""How kernel tests judge: error from fp64 against eager's error in the same dtype, on outputs poisoned with NaN."""

import contextlib
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FP8_LOST = 2.0**-16 if DEVICE.type == "cpu" else 2.0**-11
"""Of the magnitudes of a sum: fp32 of 2^8 terms, or tensor cores that keep 14 bits of four sums, each of 32 terms."""


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors, of fp8 codes too, are equal bit by bit."""
    if got.dtype is torch.float8_e4m3fn:
        got, expected = got.view(torch.uint8), expected.view(torch.uint8)
    return torch.equal(got, expected)


def assert_equal(got: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> None:
    """Ask for the same bits, pair by pair."""
    differing = [number for number, pair in enumerate(zip(got, expected, strict=True)) if not same_bits(*pair)]
    assert not differing, f"these tensors differ: {differing}"


@contextlib.contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Fill whatever torch.empty, empty_like and new_empty return with NaN, so that an element left unwritten shows."""

    def poison(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate_nan(*args: object, **kwargs: object) -> torch.Tensor:
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return allocate_nan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poison(torch.empty))
        patch.setattr(torch, "empty_like", poison(torch.empty_like))
        patch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))
        yield


def assert_as_accurate_as_eager(
    name: str, got: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor, slack: float = 1.5, terms: int = 1
) -> None:
    """Ask that the error from fp64 stays within `slack` times eager's, plus what no implementation can avoid.

    That is two roundings of the value, and what an fp32 sum of `terms` terms loses in any order.
    """
    assert got.dtype == eager.dtype, f"{name}: {got.dtype}, eager {eager.dtype}"
    assert got.shape == truth.shape, f"{name}: {tuple(got.shape)}, truth {tuple(truth.shape)}"
    if got.numel() == 0:
        return
    rounding, summation = 2 * torch.finfo(got.dtype).eps, terms**0.5 * 2**-24
    for measure, deviations in ((_largest, 6), (_mean_square, 1)):  # the largest of millions lies 5 to 6 out
        error, eager_error = measure(got.double() - truth), measure(eager.double() - truth)
        bound = slack * eager_error + (rounding + deviations * summation) * measure(truth)
        assert error <= bound, (
            f"{name} ({measure.__name__}): error {error:.3g}, bound {bound:.3g}, eager {eager_error:.3g}"
        )


def _largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item()


def _mean_square(tensor: torch.Tensor) -> float:
    return tensor.square().mean().sqrt().item()


def check_against_reference(
    names: str,
    function: Callable[..., torch.Tensor],
    reference: Callable[..., torch.Tensor],
    inputs: list[torch.Tensor],
    wanted: list[int] | None = None,
) -> None:
    """Compare output and gradients of `function` with `reference` in fp64, and with eager in the inputs' dtype.

    `names` names the inputs, space-separated; `wanted` are the positions whose gradients exist (None: all).
    """
    wanted = list(range(len(inputs))) if wanted is None else wanted

    def output_and_gradients(
        call: Callable[..., torch.Tensor], dtype: torch.dtype, upstream: torch.Tensor | None, positions: list[int]
    ) -> list[torch.Tensor]:
        # `to` a wider dtype keeps the strides of a dense tensor, `detach` keeps any
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
        output = call(*leaves)
        upstream = random_like(output) if upstream is None else upstream.to(dtype)
        gradients = torch.autograd.grad(output, [leaves[position] for position in positions], upstream)
        return [output.detach(), *gradients, upstream]

    with poisoned_outputs():
        *got, upstream = output_and_gradients(function, inputs[0].dtype, None, wanted)
    *eager, _ = output_and_gradients(reference, inputs[0].dtype, upstream, wanted)
    *truth, _ = output_and_gradients(reference, torch.float64, upstream, wanted)
    terms = 2 * max(max(tensor.shape, default=1) for tensor in inputs)
    labels = ["output", *(f"gradient of {names.split()[position]}" for position in wanted)]
    for label, *results in zip(labels, got, eager, truth, strict=True):
        assert_as_accurate_as_eager(label, *results, terms=terms)


def random_like(tensor: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tensor.numel())
    return torch.randn(tensor.shape, generator=generator).to(tensor.dtype).to(tensor.device)


def random_tensor(
    *shape: int, dtype: torch.dtype, layout: str = "contiguous", scale: float = 1.0, seed: int = 0
) -> torch.Tensor:
    """Draw a seeded tensor on DEVICE in one of LAYOUTS: half is the second one of a packed matrix."""
    generator = torch.Generator(DEVICE).manual_seed(seed + 1000 * sum(shape))

    def draw(*size: int) -> torch.Tensor:
        return (torch.randn(size, generator=generator, device=DEVICE) * scale).to(dtype)

    if layout == "contiguous" or len(shape) < 2:
        return draw(*shape)
    *lead, rows, columns = shape
    if layout == "transposed":
        return draw(*lead, columns, rows).transpose(-1, -2)
    wide = draw(*lead, rows, 2 * columns)
    return {"half": wide[..., columns:], "strided": wide[..., ::2]}[layout]


LAYOUTS = ["contiguous", "transposed", "half", "strided"]
