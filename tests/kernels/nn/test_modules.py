import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accuracy import DEVICE, DTYPES, assert_as_accurate_as_eager, assert_equal, check_against_reference, random_tensor
from stock_mlp import LlamaMLP
from torch import nn

from swiglu_kernels import FusedSwiGLU, FusedSwiGLUMLP, FusedSwiGLUPackedMLP
from swiglu_kernels.nn import modules
from swiglu_kernels.runtime import backend

HIDDEN, INTERMEDIATE = 9, 14
CLASSES = [FusedSwiGLU, FusedSwiGLUMLP, FusedSwiGLUPackedMLP]
CUDA_GRAPH_SIZE = 256


def stock_mlp() -> LlamaMLP:
    return LlamaMLP(HIDDEN, INTERMEDIATE, device=DEVICE)


class Adapter(nn.Linear):
    """Stands for an adapter or a quantised layer: a Linear that is more than its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


def built(cls: type[nn.Module], dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """A module with seeded weights."""
    torch.manual_seed(0)
    return cls(HIDDEN, INTERMEDIATE, device=DEVICE, dtype=dtype, **options)


def hidden_states(*lead: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return random_tensor(*lead, HIDDEN, dtype=dtype)


def in_plain_torch(
    cls: type[nn.Module], x: torch.Tensor, parameters: Sequence[torch.Tensor], bias: bool
) -> torch.Tensor:
    """The definition of each class; parameters in the order of the class, a bias after its weight."""
    layers = [parameters[i : i + 1 + bias] for i in range(0, len(parameters), 1 + bias)]
    if cls is FusedSwiGLUPackedMLP:
        halves = [parameter.chunk(2) for parameter in layers[0]]
        layers = [*zip(*halves, strict=True), layers[1]]
    gate, up, *down = layers
    z = F.silu(F.linear(x, *gate)) * F.linear(x, *up)
    return F.linear(z, *down[0]) if down else z


def functional(module: nn.Module) -> Callable[..., torch.Tensor]:
    """The module as a function of x and its parameters."""
    names = [name for name, _ in module.named_parameters()]
    return lambda x, *weights: torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (x,))


def gradients(
    module: nn.Module, x: torch.Tensor, call: Callable[..., torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Gradients of x and of every parameter, by backward()."""
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    (module if call is None else call)(x).square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_output_and_gradients(cls, bias, dtype):
    module = built(cls, dtype, bias=bias)
    weights = [parameter.detach() for parameter in module.parameters()]
    names = " ".join(name for name, _ in module.named_parameters())
    check_against_reference(
        f"x {names}",
        functional(module),
        lambda x, *parameters: in_plain_torch(cls, x, parameters, bias),
        [hidden_states(2, 3, dtype=dtype), *weights],
    )


def test_state_dict_is_that_of_the_stock_mlp():
    torch.manual_seed(0)
    stock, fused = stock_mlp(), built(FusedSwiGLUMLP)
    assert_equal(list(fused.parameters()), list(stock.parameters()))  # drawn alike
    assert list(fused.state_dict()) == list(stock.state_dict())
    stock = stock_mlp()
    fused.load_state_dict(stock.state_dict(), strict=True)
    x = hidden_states(2, 3)
    truth = copy.deepcopy(stock).double()(x.double())
    assert_as_accurate_as_eager("output", fused(x).detach(), stock(x).detach(), truth.detach())
    stock.load_state_dict(fused.state_dict(), strict=True)


@pytest.mark.parametrize("cls", CLASSES)
def test_options_and_weights_reach_the_function_as_they_are(cls, monkeypatch):
    given = {"weight_grad": "torch", "save": "input", "input_grad": "fused"}
    module = built(cls, **given)
    name = "swiglu_glu" if cls is FusedSwiGLU else "swiglu_mlp"
    seen = []
    run = getattr(modules, name)
    monkeypatch.setattr(modules, name, lambda *operands, **options: seen.append((operands, options)) or run(*operands))
    module(hidden_states(3))
    ((operands, options),) = seen
    assert given.items() <= options.items()
    first, *others = module.parameters()
    second = first[INTERMEDIATE:] if cls is FusedSwiGLUPackedMLP else others[0]
    assert [weight.data_ptr() for weight in operands[1:3]] == [first.data_ptr(), second.data_ptr()]


def test_from_linears_shares_the_layers():
    stock, packed = stock_mlp(), built(FusedSwiGLUPackedMLP)
    state_of_the_generator = torch.get_rng_state()
    layers = (stock.gate_proj, stock.up_proj, stock.down_proj)
    mlp = FusedSwiGLUMLP.from_linears(*layers, save="input")
    glu = FusedSwiGLU.from_linears(*layers[:2], weight_grad="torch")
    packed_mlp = FusedSwiGLUPackedMLP.from_linears(packed.gate_up_proj, packed.down_proj, input_grad="two_step")
    assert (mlp.gate_proj, mlp.up_proj, mlp.down_proj) == layers
    assert (glu.gate_proj, glu.up_proj) == layers[:2]
    assert packed_mlp.gate_up_proj is packed.gate_up_proj
    assert (mlp.options.save, glu.options.weight_grad, packed_mlp.options.input_grad) == ("input", "torch", "two_step")
    assert torch.equal(torch.get_rng_state(), state_of_the_generator)
    x = hidden_states(3)
    torch.testing.assert_close(mlp(x), stock(x))
    assert torch.equal(packed_mlp(x), packed(x))


def test_backend_and_repr_tell_what_runs(monkeypatch):
    module = built(FusedSwiGLUMLP, save="input")
    assert module.backend == ("triton" if DEVICE.type == "cuda" else "interpreter")
    assert all(part in repr(module) for part in ("save='input', input_grad='auto'", f"backend={module.backend!r}"))
    monkeypatch.setattr(backend, "INTERPRETING", False)
    on_cpu = module.to("cpu")
    assert on_cpu.backend == "torch"
    x = hidden_states(3).cpu()
    assert torch.equal(on_cpu(x), in_plain_torch(FusedSwiGLUMLP, x, list(on_cpu.parameters()), bias=False))


def test_autocast_takes_any_mix_that_linear_takes():
    module = built(FusedSwiGLUMLP)
    module.down_proj.half()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert module(hidden_states(3, dtype=torch.float16)).dtype == torch.bfloat16
        with torch.autocast(DEVICE.type, enabled=False), pytest.raises(TypeError, match=r"expected torch\.float32"):
            module(hidden_states(3, dtype=torch.float16))
        with pytest.raises(TypeError, match=r"x: expected .*, got torch\.float64"):  # which autocast leaves alone
            module(hidden_states(3, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"down_proj.weight: expected torch.float32 as gate_proj.weight has"):
        module(hidden_states(2))


@pytest.mark.parametrize("kind", CLASSES)
def test_float64_is_computed_by_the_definition(kind):
    module, x = built(kind).double(), hidden_states(2, dtype=torch.float64).requires_grad_()
    assert module.backend == "torch"
    assert torch.autograd.gradcheck(module, x)
    assert torch.autograd.gradgradcheck(module, x)


def test_copies_pickles_and_exports():
    module, x = built(FusedSwiGLUMLP, save="input"), hidden_states(3)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(module), torch.load(buffer, weights_only=False)):
        assert other.options == module.options
        assert torch.equal(other(x), module(x))
    assert torch.equal(torch.export.export(module, (x,)).module()(x), module(x))


CHANGES = {
    r"up_proj: .* Adapter is not a plain torch.nn.Linear": lambda mlp: setattr(mlp, "up_proj", Adapter(9, 14)),
    r"gate_proj: .* hooks .* on the whole FusedSwiGLUMLP": lambda mlp: mlp.gate_proj.register_forward_hook(print),
    r"down_proj: .* hooks": lambda mlp: mlp.down_proj.register_full_backward_hook(print),
    r"gate_proj: .* its forward was replaced": lambda mlp: setattr(mlp.gate_proj, "forward", print),
}


@pytest.mark.parametrize("words", CHANGES)
def test_what_a_projection_does_besides_is_never_passed_over(words):
    module = built(FusedSwiGLUMLP)
    CHANGES[words](module)
    with pytest.raises(TypeError, match=words):
        module(hidden_states(2))


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (3, TypeError, r"x: expected a torch.Tensor, got int"),
        (torch.ones(2, 8), ValueError, r"x: expected \[\.\.\., 9\], the in_features of {first}, got \(2, 8\)"),
        (torch.ones(2, 9).half(), TypeError, r"x: expected torch.float32 as {first}.weight has, got torch.float16"),
        (torch.ones(2, 9).double(), TypeError, r"x: expected torch.float32 as {first}.weight has, got torch.float64"),
        (torch.ones(2, 9, device="meta"), ValueError, r"x: expected device .* as {first}.weight has, got meta"),
    ],
    ids=["no tensor", "trailing size", "half", "double", "device"],
)
def test_bad_input_names_the_argument(x, error, message):
    x = x.to(DEVICE) if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x
    for module in map(built, CLASSES):
        first = next(name for name, _ in module.named_children())
        with pytest.raises(error, match=message.replace("{first}", first)):
            module(x)


def linears(*sizes: tuple[int, int]) -> list[nn.Linear]:
    return [nn.Linear(*size) for size in sizes]


@pytest.mark.parametrize(
    ("cls", "layers", "error", "words"),
    [
        (FusedSwiGLU, [nn.Linear(4, 6), 3], TypeError, r"up_proj: .*torch.nn.Linear, got i"),
        (FusedSwiGLU, linears((4, 6), (5, 6)), ValueError, r"up_proj: expected 4 in_features, got 5"),
        (FusedSwiGLUMLP, linears((4, 6), (4, 7), (6, 4)), ValueError, r"up_proj: expected 6 out_features, got 7"),
        (FusedSwiGLUMLP, linears((4, 6), (4, 6), (4, 4)), ValueError, r"down_proj: expected 6 in_features, got 4"),
        (FusedSwiGLUPackedMLP, linears((4, 7), (3, 4)), ValueError, r"gate_up_proj: .*even.* out_features, got 7"),
        (FusedSwiGLUPackedMLP, linears((4, 6), (6, 4)), ValueError, r"down_proj: expected 3 in_features, got 6"),
    ],
)
def test_layers_that_do_not_fit(cls, layers, error, words):
    with pytest.raises(error, match=words):
        cls.from_linears(*layers)


@pytest.mark.gpu
@pytest.mark.parametrize("cls", CLASSES)
def test_cuda_graph_with_changed_inputs(cls):
    module = cls(CUDA_GRAPH_SIZE, CUDA_GRAPH_SIZE, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(64, CUDA_GRAPH_SIZE, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    wanted = [x, *module.parameters()]

    def step() -> list[torch.Tensor]:
        output = module(x)
        return [output.detach(), *torch.autograd.grad(output.float().square().sum(), wanted)]

    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
            for parameter in module.parameters():
                parameter.copy_(torch.randn_like(parameter) / 16)
        graph.replay()
        for got, expected in zip(captured, step(), strict=True):  # results of other inputs would be off by 1.4
            assert (got - expected).float().norm() <= 0.01 * expected.float().norm()
