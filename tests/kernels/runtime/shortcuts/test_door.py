"""Calls that are made again, and kinds of tensors, told apart by PyTorch's guards and, where it has none, in Python."""

import contextlib
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from clamped import keep_off_limit
from replayed import as_on_a_gpu
from torch.autograd import forward_ad
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import BaseTorchDispatchMode

from swiglu_kernels import reference, swiglu_experts, swiglu_glu, swiglu_mlp
from swiglu_kernels.ops.experts import operation as experts
from swiglu_kernels.ops.glu import block
from swiglu_kernels.ops.glu import operation as glu
from swiglu_kernels.ops.mlp import operation as mlp
from swiglu_kernels.runtime import backend, internals
from swiglu_kernels.runtime.operator import Operator
from swiglu_kernels.runtime.shortcuts import door, plan
from swiglu_kernels.runtime.shortcuts.door import Kinds
from swiglu_kernels.runtime.shortcuts.series import Series
from swiglu_kernels.tiles.candidates import BY_TORCH

needs_interpreter = pytest.mark.skipif(not backend.INTERPRETING, reason="needs Triton's interpreter")
on_a_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch.cuda.is_available() is False"
)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Kernels are interpreted on a CPU, and calls repeated as on a GPU; which of them took the short way."""
    taken: list[str] = []

    def noted(operator: Operator, *arguments: Any) -> Any:
        taken.append(operator.name)
        return first_output(operator, *arguments)

    first_output = Operator.first_output
    monkeypatch.setattr(Operator, "first_output", noted)
    with as_on_a_gpu():
        yield taken


@pytest.fixture
def checked(short: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls whose arguments were checked, which are those that took the long way."""
    found: list[str] = []
    check = block.check_glu
    monkeypatch.setattr(block, "check_glu", lambda *given: found.append("") or check(*given))
    return found


def tensors(tokens: int = 5, bias: bool = False) -> list[torch.Tensor | None]:
    weights = [torch.randn(8, 4), torch.randn(8, 4)]
    return [torch.randn(tokens, 4), *weights, *([torch.randn(8), torch.randn(8)] if bias else [None, None])]


@needs_interpreter
@pytest.mark.parametrize("bias", [False, True], ids=["", "biases"])
@pytest.mark.parametrize("function", [swiglu_glu, swiglu_mlp])
def test_only_the_first_call_of_a_kind_takes_the_long_way(checked: list[str], function: Any, bias: bool) -> None:
    for count in range(5):
        given = tensors(bias=bias)
        if function is swiglu_mlp:
            given.insert(3, torch.randn(6, 8))
            given.append(torch.randn(6) if bias else None)
        with door.closed() if count == 0 else contextlib.nullcontext():
            out = function(*given)
        assert torch.allclose(out, getattr(reference, function.__name__)(*given), atol=1e-5)
        assert (len(checked), len(door.calls)) == (min(count + 1, 2), min(count, 1))
    if function is swiglu_mlp:
        function(*given, chunk_tokens=2)
    assert len(door.calls) == 1, "chunks are several launches"
    plan.forget()
    function(*given)
    assert len(checked) > 2


@needs_interpreter
def test_leading_dimensions_are_kept(checked: list[str]) -> None:
    _, *weights = tensors()
    for number, x in enumerate((torch.randn(2, 3, 4), torch.randn(3, 2, 4).transpose(0, 1), torch.randn(4)), start=1):
        for _ in range(2):
            out = swiglu_glu(x, *weights)
            assert out.shape == (*x.shape[:-1], 8)
            assert torch.allclose(out, reference.swiglu_glu(x, *weights), atol=1e-6)
        assert len(checked) == number


@needs_interpreter
@pytest.mark.usefixtures("short")
def test_another_kind_is_checked_anew() -> None:
    x, w_gate, w_up, *_ = tensors()
    swiglu_glu(x, w_gate, w_up)
    swiglu_glu(x, w_gate, w_up)
    for wrong, error in (
        ({"gate_multiplier": True}, TypeError),
        ({"alpha": "1"}, TypeError),
        ({"activation": ["silu"]}, ValueError),
        ({"save": "everything"}, ValueError),
    ):
        with pytest.raises(error, match=next(iter(wrong))):
            swiglu_glu(x, w_gate, w_up, **wrong)
    with pytest.raises(ValueError, match="w_up: expected shape"):
        swiglu_glu(x, w_gate, w_up[:4])
    for x_given in ([1.0], None):
        with pytest.raises(TypeError, match=r"x: expected a torch\.Tensor"):
            swiglu_glu(x_given, w_gate, w_up)
    ours, expected = (glu(x, w_gate, w_up, up_offset=1.0) for glu in (swiglu_glu, reference.swiglu_glu))
    assert torch.allclose(ours, expected, atol=1e-6)
    assert len(door.calls) == 2


class Own(torch.Tensor):
    pass


def kind(x: torch.Tensor, w: torch.Tensor) -> Any:
    return door.find("glu", (x, w), (None, None), ())[0]


def known(x: torch.Tensor, w: torch.Tensor) -> Any:
    return door.find("glu", (x, w), (None, None), ())[1]


@pytest.mark.usefixtures("short")
def test_who_watches_sees_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(2, 4), torch.nn.Parameter(torch.randn(8, 4))
    made = kind(x, w)
    assert made is not None
    door.remember(made, torch.add)
    assert known(x, w) is torch.add
    for other in (x, w.detach()), (x.clone().requires_grad_(), w):
        assert known(*other) is None, "a gradient is wanted"
    with torch.no_grad():
        assert kind(x, w) is not None
        assert kind(x.as_subclass(Own), w) is None
        assert kind(x.to_sparse(), w) is None
        negative = torch.complex(x, x).conj().imag
        door.remember(kind(negative, w), torch.add)
        assert known(negative, w) is None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            assert kind(x, w) is None
        for mode in (BaseTorchDispatchMode(), BaseTorchFunctionMode(), forward_ad.dual_level()):
            with mode:
                assert kind(x, w) is None
        seen = []
        torch.func.vmap(lambda row: seen.append(kind(row, w.detach())) or row)(x)
        torch.jit.trace(lambda x: (seen.append(kind(x, w)), x)[1], (x,), check_trace=False)
        assert seen == [None] * len(seen)
        assert len(seen) >= 2
        assert kind(x, w) is not None
    with torch.inference_mode():
        assert kind(x, w) is not None
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    assert kind(x, w) is None


def series_made(monkeypatch: pytest.MonkeyPatch) -> list[Series]:
    """Every series that is made from now on."""
    made: list[Series] = []
    real = Series.__init__
    monkeypatch.setattr(Series, "__init__", lambda self: made.append(self) or real(self))
    return made


def leaves(*wanted: bool, bias: bool, down: bool) -> list[torch.Tensor | None]:
    torch.manual_seed(1)
    shapes = [(2, 3, 8), (16, 8), (16, 8), *([(8, 16)] if down else [])]
    shapes += [(16,), (16,), *([(8,)] if down else [])] if bias else []
    made = [
        torch.randn(shape).requires_grad_(want)
        for shape, want in zip(shapes, [*wanted, *[True] * 4][: len(shapes)], strict=True)
    ]
    return made if bias else [*made, *[None] * (3 if down else 2)]


def gradients(function: Any, given: list[torch.Tensor | None], **options: Any) -> list[torch.Tensor | None]:
    out = function(*given, **options)
    out.square().sum().backward()
    return [out.detach(), *(None if tensor is None else tensor.grad for tensor in given)]


@needs_interpreter
@pytest.mark.parametrize(
    ("wanted", "bias"),
    [((True, True, True), True), ((False, True, True), False), ((True, False, False), True)],
    ids=str,
)
@pytest.mark.parametrize(
    "options",
    [{}, {"save": "input"}, {"weight_grad": "torch", "input_grad": "torch"}, {"input_grad": "fused", "limit": 1.0}],
    ids=str,
)
@pytest.mark.parametrize("function", [swiglu_glu, swiglu_mlp])
def test_the_same_gradients_by_the_short_way(
    short: list[str], function: Any, options: dict[str, Any], wanted: tuple[bool, ...], bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    made = series_made(monkeypatch)
    down = function is swiglu_mlp
    found = [gradients(function, leaves(*wanted, bias=bias, down=down), **options) for _ in range(4)]
    assert len(short) == 3
    followers = [follower for series in made for follower in series.followers.values()]
    assert followers
    assert all(series._replay for series in [*followers, *(first for first in made if first.followers)]), "all replayed"
    for again in found[1:]:
        torch.testing.assert_close(again, found[0], rtol=0, atol=0)


def experts_layer(number: int, wanted: bool, bias: bool) -> list[torch.Tensor | None]:
    """Of 6 tokens, 2 of 3 experts each, hidden 8 and intermediate 16; other values for every number."""
    torch.manual_seed(number)
    shapes = [(2, 3, 8), (3, 32, 8), (3, 8, 16), (2, 3, 2), *([(3, 32), (3, 8)] if bias else [])]
    made: list[torch.Tensor | None] = [torch.randn(shape).requires_grad_(wanted) for shape in shapes]
    return [*made, *[None] * (6 - len(made)), torch.rand(2, 3, 3).topk(2).indices]


def mixture(function: Any, *given: torch.Tensor | None, **options: Any) -> Any:
    x, w_gate_up, w_down, weights, b_gate_up, b_down, index = given
    return function(x, w_gate_up, w_down, index, weights, b_gate_up=b_gate_up, b_down=b_down, **options)


@needs_interpreter
@pytest.mark.parametrize("options", [{}, {"interleaved": True, "limit": 1.0}, {"recompute": True}], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "biases"])
@pytest.mark.parametrize("wanted", [False, True], ids=["no gradient", "gradients"])
def test_experts_by_the_short_way(
    short: list[str], wanted: bool, bias: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Any] = []
    made = series_made(monkeypatch)
    monkeypatch.setattr(experts, "check_experts", lambda *arguments: checked.append(arguments))
    wanted_of = {name: value for name, value in options.items() if name != "recompute"}
    for number in range(4):
        results = []
        for function, asked in ((swiglu_experts, options), (reference.swiglu_experts, wanted_of)):
            given = experts_layer(number, wanted, bias)
            keep_off_limit(options, given[0], given[1:2], given[4:5])
            out = mixture(function, *given, **asked)
            if wanted:
                out.square().sum().backward()
            leaves = [tensor for tensor in given if tensor is not None and tensor.requires_grad]
            results.append([out.detach(), *(leaf.grad for leaf in leaves)])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert len(checked) == 1
    assert len(short) == (3 if wanted else 0)
    assert len(made) == 1 + wanted
    assert all(series._replay for series in made), "all are replayed"


@needs_interpreter
@pytest.mark.parametrize("wanted", [False, True], ids=["no gradient", "gradients"])
@pytest.mark.parametrize("flat", [False, True], ids=["stacked", "flat"])
def test_parameters_anywhere_in_a_storage(
    short: list[str], flat: bool, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of one kind, whose tensors are parts of larger ones: of one for each parameter, or of one for all."""
    monkeypatch.setattr(mlp.choice, "hidden_grad", lambda *_, **__: BY_TORCH)
    if flat:
        monkeypatch.setattr(glu.choice, "forward", lambda *_, **__: BY_TORCH)
    made = series_made(monkeypatch)
    torch.manual_seed(2)
    shapes = [(2, 3, 8), (16, 8), (16, 8), (8, 16)]
    sizes = [math.prod(shape) for shape in shapes]
    stacks = [part.clone() for part in torch.randn(4, sum(sizes)).split(sizes, 1)]
    stacks = list(torch.cat(stacks, 1).split(sizes, 1)) if flat else stacks
    chunked = [{"chunk_tokens": 2}] if wanted else []  # no such call is remembered without gradients
    for options in ({}, {"save": "input"}, {"weight_grad": "torch", "input_grad": "torch"}, *chunked):
        for number in range(4):
            parts = [stack[number].view(shape).detach() for stack, shape in zip(stacks, shapes, strict=True)]
            given = [part.requires_grad_(wanted) for part in parts]
            outs = [swiglu_mlp(*given, **options), reference.swiglu_mlp(*given)]
            torch.testing.assert_close(*outs, atol=1e-4, rtol=1e-4)
            if wanted:
                gradients = [torch.autograd.grad(out.square().sum(), given) for out in outs]
                torch.testing.assert_close(*gradients, atol=1e-3, rtol=1e-3)
    played = [replayed for series in made for replayed in (series, *series.followers.values())]
    assert all(series._replay for series in played), "the last ones are replayed"


@needs_interpreter
def test_what_backward_may_do_to_the_short_way(short: list[str]) -> None:
    given = leaves(True, True, True, bias=False, down=False)
    expected = gradients(swiglu_glu, given)[1:4]
    for tensor in given[:3]:
        tensor.grad = None
    out = swiglu_glu(*given)
    for _ in range(2):  # the second time on a retained graph
        found = torch.autograd.grad(out, given[:3], 2 * out.detach(), retain_graph=True)
        torch.testing.assert_close(list(found), expected)
    (dx,) = torch.autograd.grad(swiglu_glu(*given).sum(), given[0], create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated"):
        dx.sum().backward()
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: packed.append(kept) or kept.clone(), lambda kept: kept):
        out = swiglu_glu(*given)
    torch.testing.assert_close(list(torch.autograd.grad(out, given[:3], 2 * out.detach())), expected)
    assert packed
    assert short == ["swiglu_kernels::glu"] * len(short)
    assert len(short) >= 3


@needs_interpreter
@pytest.mark.parametrize("function", [swiglu_glu, swiglu_mlp])
def test_saved_tensors_that_come_back_with_other_strides(short: list[str], function: Any) -> None:
    """Neither is taken for the other, whichever was recorded first."""
    given = leaves(True, True, True, bias=False, down=function is swiglu_mlp)
    wanted = [tensor for tensor in given if tensor is not None]
    expected = tuple(gradients(function, given)[1 : len(wanted) + 1])

    def turned(saved: torch.Tensor) -> torch.Tensor:
        return saved.mT.contiguous().mT if saved.dim() == 2 else saved

    for turn in range(8):
        unpack = turned if turn % 4 in (1, 2) else torch.Tensor.detach
        hooks = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, unpack)
        with hooks if unpack is turned else contextlib.nullcontext():
            out = function(*given)
        found = torch.autograd.grad(out.square().sum(), wanted)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert len(short) == 8


@needs_interpreter
def test_a_parameter_that_is_written_after_the_forward_is_found_out(short: list[str]) -> None:
    given = leaves(True, True, True, bias=False, down=False)
    for _ in range(4):
        gradients(swiglu_glu, given)
        out = swiglu_glu(*given)
        with torch.no_grad():
            given[1].mul_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    assert len(short) == 7


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 16, 100, 1024])
def test_on_a_gpu(tokens: int, dtype: torch.dtype) -> None:
    plan.forget()
    w_gate, w_up, w_down = (torch.randn(*shape, device="cuda").to(dtype) for shape in ((96, 64), (96, 64), (64, 96)))
    for number in range(3):
        x = torch.randn(2, tokens, 64, device="cuda").to(dtype)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            z, out = swiglu_glu(x, w_gate, w_up), swiglu_mlp(x, w_gate, w_up, w_down)
        torch.cuda.synchronize()
        wanted = x.clone().requires_grad_()  # the long way
        torch.testing.assert_close(z, swiglu_glu(wanted, w_gate, w_up, weight_grad="none").detach())
        torch.testing.assert_close(out, swiglu_mlp(wanted, w_gate, w_up, w_down, weight_grad="none").detach())
        assert len(door.calls) == 2, number


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("wanted", [False, True], ids=["no gradient", "gradients"])
@pytest.mark.parametrize("tokens", [1, 100, 4096])
def test_experts_on_a_gpu(tokens: int, wanted: bool) -> None:
    def results(number: int) -> list[torch.Tensor]:
        torch.manual_seed(number)
        shapes = (tokens, 256), (16, 512, 256), (16, 256, 256), (tokens, 4)
        given = [torch.randn(shape, device="cuda").bfloat16().requires_grad_(wanted) for shape in shapes]
        out = mixture(swiglu_experts, *given, None, None, torch.rand(tokens, 16, device="cuda").topk(4).indices)
        return [out, *(torch.autograd.grad(out.sum(), given) if wanted else [])]

    plan.forget()
    found = [results(number) for number in range(4)]
    for number, short in enumerate(found):
        plan.forget()  # the long way
        assert all(map(torch.equal, short, results(number)))


@pytest.fixture(params=["guards", "Python"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "Python":
        monkeypatch.setattr(internals, "guard", lambda _: None)
    else:
        assert internals.guard([torch.empty(2)]) is not None


OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sizes": lambda x: x[:3],
    "strides": lambda x: x.t().contiguous().t(),
    "dimensions": lambda x: x[None],
    "dtype": lambda x: x.half(),
    "device": lambda x: x.to("meta"),
    "a gradient": lambda x: x.clone().requires_grad_(),
    "another type": lambda x: x.as_subclass(Own),
    "a parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "negated": lambda x: torch.complex(x, x).conj().imag,
    "sparse": lambda x: x.to_sparse(),
}


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("change", OTHERS)
@pytest.mark.parametrize("place", [0, 1])
def test_another_kind_is_not_taken_for_it(change: str, place: int) -> None:
    given = [torch.randn(4, 8), torch.randn(4, 8)]
    known: Kinds[str] = Kinds()
    known.add("key", given, "found")
    assert known.get("key", [torch.randn(4, 8), torch.randn(4, 8)]) == "found"
    assert known.get("another", given) is None
    given[place] = OTHERS[change](given[place])
    assert known.get("key", given) is None
    known.add("key", given, "the other")
    assert known.get("key", given) == "the other"
    assert known.get("key", [torch.randn(4, 8), torch.randn(4, 8)]) == "found"


@pytest.mark.usefixtures("_way")
def test_a_tensor_that_is_given_twice_is_two() -> None:
    x, known = torch.randn(4, 8), Kinds[str]()
    known.add("key", [x, x], "found")
    assert known.get("key", [x, x]) == "found"
    assert known.get("key", [x, x.clone()]) == "found"


@pytest.mark.usefixtures("_way")
def test_the_precision_of_float32_products_belongs_to_it() -> None:
    known: Kinds[str] = Kinds()
    for dtype in (torch.float32, torch.bfloat16):
        known.add("key", [torch.ones(2, dtype=dtype)], "found")
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
    try:
        assert known.get("key", [torch.ones(2)]) is None
        assert known.get("key", [torch.ones(2, dtype=torch.bfloat16)]) == "found"
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.usefixtures("_way")
def test_they_keep_no_tensor_alive_and_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "MOST_KINDS", 3)
    monkeypatch.setattr(door, "MOST_KEYS", 2)
    known: Kinds[int] = Kinds()
    alive = []
    for key in range(4):
        for size in range(1, 6):
            tensor = torch.empty(size)
            alive.append(weakref.ref(tensor))
            known.add(key, [tensor], size)
            del tensor
    gc.collect()
    assert not any(reference() is not None for reference in alive)
    assert known.values() == [3, 4, 5, 3, 4, 5], "the newest"
    assert known.get(3, [torch.empty(5)]) == 5
    known.clear()
    assert len(known) == 0
