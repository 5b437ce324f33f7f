"""patch_model on real transformers models, tiny and randomly initialised, held against the unpatched model."""

import copy
import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accuracy import DEVICE, assert_as_accurate_as_eager
from torch import nn

from swiglu_kernels import FusedSwiGLU, FusedSwiGLUMLP, patch_model, unpatch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # every model here is made from a config
transformers = pytest.importorskip("transformers")

# Of the interpreter, where a self-check makes gates large: exp(-v) = inf, so that sigmoid(v) = 0.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")

FAMILIES = ["Llama", "Qwen2", "Qwen3", "Mistral", "Phi3"]
BY_STRUCTURE = ["Gemma", "Gemma2", "Gemma3", "Olmo2", "SmolLM3", "Granite", "Cohere2", "Glm4"]
SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TOKEN_IDS = torch.randint(3, 40, (2, 7), generator=torch.Generator().manual_seed(0)).to(DEVICE)


def stock_model(family: str, **changes: Any) -> nn.Module:
    """A causal language model of a family, with seeded weights."""
    torch.manual_seed(0)
    if not hasattr(transformers, f"{family}ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    config = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")(
        **SIZES | changes
    )
    return getattr(transformers, f"{family}ForCausalLM")(config).to(DEVICE)


def stock_and_patched(family: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    stock = stock_model(family)
    patched = copy.deepcopy(stock)
    assert len(patch_model(patched, **options).changed) == SIZES["num_hidden_layers"]
    return stock, patched


def logits_loss_gradients(model: nn.Module, call: Callable[..., Any] | None = None) -> dict[str, torch.Tensor]:
    model.zero_grad()
    output = (model if call is None else call)(input_ids=TOKEN_IDS, labels=TOKEN_IDS, use_cache=False)
    output.loss.backward()
    gradients = {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    return {"logits": output.logits.detach(), "loss": output.loss.detach(), **gradients}


def assert_same_results(got: dict[str, torch.Tensor], stock: nn.Module) -> None:
    """Ask for fp64's results, as closely as the stock model has them.

    The slack is wider than for one operation: both errors are draws from the same distribution, carried through layers.
    """
    eager = logits_loss_gradients(stock)
    truth = logits_loss_gradients(copy.deepcopy(stock).double())
    assert list(got) == list(eager)
    for name, value in got.items():
        assert_as_accurate_as_eager(name, value, eager[name], truth[name].double(), slack=3)


@pytest.mark.parametrize("family", [*FAMILIES, *BY_STRUCTURE, "Llama with biases"])
def test_logits_loss_and_all_gradients(family):
    name, _, biases = family.partition(" ")
    stock = stock_model(name, **({"mlp_bias": True} if biases else {}))
    for path, parameter in stock.named_parameters():
        if "mlp" in path and path.endswith("bias"):
            torch.nn.init.normal_(parameter)  # zeros, as the model initialises them, would prove nothing
    patched = copy.deepcopy(stock)
    assert len(patch_model(patched).changed) == SIZES["num_hidden_layers"]
    assert_same_results(logits_loss_gradients(patched), stock)


@pytest.mark.parametrize("family", ["Llama", "Phi3"])
def test_everything_else_stays(family):
    model = stock_model(family).eval()
    parameters = dict(model.named_parameters())
    keys = list(model.state_dict())
    mlp = model.model.layers[1].mlp
    seen = []
    mlp.register_forward_hook(lambda module, *_: seen.append(module))
    patch_model(model)
    assert model.model.layers[1].mlp is mlp
    assert list(model.state_dict()) == keys
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert not mlp.training
    model(TOKEN_IDS)
    assert seen == [mlp]


@pytest.mark.parametrize(
    ("family", "dtype"), [("Llama", torch.float32), ("Phi3", torch.float16), ("Gemma", torch.bfloat16)]
)
def test_report_and_unpatch(family, dtype):
    stock = stock_model(family).to(dtype)
    model = copy.deepcopy(stock)
    new_class = "FusedSwiGLUPackedMLP" if family == "Phi3" else "FusedSwiGLUMLP"
    changes = [(f"model.layers.{layer}.mlp", f"{family}MLP", new_class) for layer in range(2)]
    report = patch_model(model)
    assert [(change.path, change.old_class, change.new_class) for change in report.changed] == changes
    assert report.left_alone == ()
    assert f"model.layers.1.mlp: {family}MLP -> {new_class}" in str(report)
    assert patch_model(model, save="input").changed == (), "unpatch first to change options"
    assert first_mlp(model).gate_options == ({"activation": "gelu_tanh"} if family == "Gemma" else {})
    assert list(model.state_dict()) == list(stock.state_dict())
    assert [(change.path, change.new_class) for change in unpatch(model).changed] == [change[:2] for change in changes]
    assert repr(model) == repr(stock)
    assert list(vars(first_mlp(model))) == list(vars(first_mlp(stock)))
    assert torch.equal(model(TOKEN_IDS).logits, stock(TOKEN_IDS).logits)
    assert unpatch(model).changed == ()


@pytest.mark.parametrize("family", ["Llama", "Phi3"])
def test_generate_save_and_reload(family, tmp_path):
    stock, patched = stock_and_patched(family)
    prompt = {"input_ids": TOKEN_IDS[:, :3], "attention_mask": torch.ones_like(TOKEN_IDS[:, :3])}
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    assert torch.equal(patched.generate(**prompt, **options), stock.generate(**prompt, **options))
    patched.save_pretrained(tmp_path)
    reloaded = type(stock).from_pretrained(tmp_path).to(DEVICE)
    assert repr(reloaded) == repr(stock)
    weights, expected = reloaded.state_dict(), stock.state_dict()
    assert list(weights) == list(expected)
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    patched.load_state_dict(reloaded.state_dict(), strict=True)


class Adapter(nn.Module):
    """A low-rank adapter around a projection, as adapter libraries build them."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Linear(base_layer.in_features, 1, bias=False, device=DEVICE)
        self.up = nn.Linear(1, base_layer.out_features, bias=False, device=DEVICE)

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.up(self.down(x))


class Linear4bit(nn.Linear):
    """Stands for a quantised layer, which has a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class QuantisedTensor(torch.Tensor):
    """Stands for a weight whose layout only a tensor subclass knows."""


def first_mlp(model: nn.Module) -> nn.Module:
    return model.model.layers[0].mlp


def with_another_class(model: nn.Module) -> None:
    first_mlp(model).__class__ = type("SlicedMLP", (type(first_mlp(model)),), {})


def with_quantised_weight(mlp: Any) -> None:
    mlp.down_proj.weight = nn.Parameter(mlp.down_proj.weight.detach().as_subclass(QuantisedTensor))


def in_slices(mlp: Any) -> None:
    mlp.config = transformers.LlamaConfig(**SIZES, pretraining_tp=2)


LEFT_ALONE: dict[str, Callable[[Any], object]] = {
    "up_proj: Adapter is not a plain torch.nn.Linear": lambda mlp: setattr(mlp, "up_proj", Adapter(mlp.up_proj)),
    "gate_proj: Linear4bit is not a plain torch.nn.Linear": lambda mlp: setattr(mlp.gate_proj, "__class__", Linear4bit),
    "down_proj: its weight is a QuantisedTensor, not a plain torch.nn.Parameter": with_quantised_weight,
    "gate_proj: its hooks would no longer run": lambda mlp: mlp.gate_proj.register_forward_pre_hook(lambda *_: None),
    "act_fn: its hooks would no longer run": lambda mlp: mlp.act_fn.register_forward_hook(lambda *_: None),
    "down_proj: its forward was replaced": lambda mlp: setattr(mlp.down_proj, "forward", lambda x: x),
    "it has more than the projections and the activation: x": lambda mlp: mlp.register_module("x", nn.Dropout()),
    "act_fn: its activation is GELU, not": lambda mlp: setattr(mlp, "act_fn", nn.GELU()),
    "its projections differ in dtype or device": lambda mlp: mlp.down_proj.half(),
    "gate_proj: its weight is torch.float64, the kernels compute in float32": lambda mlp: mlp.double(),
    "config.pretraining_tp is above 1": in_slices,
}


@pytest.mark.parametrize("reason", LEFT_ALONE)
def test_left_alone_with_the_reason(reason):
    model = stock_model("Llama")
    LEFT_ALONE[reason](first_mlp(model))
    mlp, old_class, attributes = first_mlp(model), type(first_mlp(model)), dict(vars(first_mlp(model)))
    report = patch_model(model)
    assert [change.path for change in report.changed] == ["model.layers.1.mlp"]
    (left,) = report.left_alone
    assert (left.path, left.class_name) == ("model.layers.0.mlp", old_class.__name__)
    assert left.reason.startswith(reason)
    assert f"model.layers.0.mlp: {old_class.__name__} left alone: {reason}" in str(report)
    assert type(mlp) is old_class
    assert vars(mlp) == attributes


class GatedMLP(nn.Module):
    """A class that nobody knows; its sizes are no powers of two."""

    def __init__(self, activation: object = F.silu, **changes: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate_proj, self.up_proj = (nn.Linear(24, 40, device=DEVICE) for _ in range(2))
        self.down_proj = nn.Linear(40, 24, device=DEVICE)
        self.act = activation
        self.__dict__ |= changes

    def forward(self, x):
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize(
    "activation",
    [nn.SiLU(), F.silu, nn.GELU("tanh"), functools.partial(F.gelu, approximate="tanh")],
    ids=["SiLU", "silu", "GELU", "gelu"],
)
def test_any_class_with_a_known_activation(activation):
    mlp = GatedMLP(activation)
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    stock, truth = mlp(x).detach(), copy.deepcopy(mlp).double()(x.double()).detach()
    random_state, seen = torch.get_rng_state(), []
    mlp.register_forward_hook(lambda *_: seen.append(1))
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert len(patch_model(mlp).changed) == 1
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not seen
    assert mlp.training
    assert_as_accurate_as_eager("output", mlp(x).detach(), stock, truth, terms=80)


GATED: dict[str, tuple[Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor], dict[str, Any]]] = {
    "DeepseekV4": (
        lambda mlp, gate, up: F.silu(gate.clamp(max=mlp.limit)) * up.clamp(min=-mlp.limit, max=mlp.limit),
        {"limit": 1.0},
    ),
    "Step3p7": (
        lambda mlp, gate, up: F.silu(gate).clamp(max=mlp.limit) * up.clamp(min=-mlp.limit, max=mlp.limit),
        {"activation": "silu_clamp", "limit": 1.0},
    ),
    "without a limit": (lambda mlp, gate, up: F.silu(gate).clamp(max=mlp.limit) * up, {"limit": float("inf")}),
    "gpt-oss": (
        lambda mlp, gate, up: gate * torch.sigmoid(mlp.swiglu_alpha * gate) * (up + 1),
        {"alpha": 1.5, "up_offset": 1.0},
    ),
}


@pytest.mark.parametrize("name", GATED)
def test_the_gate_is_found_by_what_the_forward_does(name):
    gate, expected = GATED[name]

    def forward(mlp, x):
        return mlp.down_proj(gate(mlp, mlp.gate_proj(x), mlp.up_proj(x)))

    numbers = {"limit": expected.get("limit"), "swiglu_alpha": expected.get("alpha")}
    mlp = type("Bounded", (GatedMLP,), {"forward": forward})(**numbers)
    if name == "gpt-oss":
        del mlp.act  # the module has no activation
    x = 2 * torch.randn(64, 24, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    stock = mlp(x).detach()
    (changed,) = patch_model(mlp, classes=["Bounded"]).changed
    assert changed.new_class == "FusedSwiGLUMLP"
    assert mlp.gate_options == ({} if name == "without a limit" else expected)
    torch.testing.assert_close(mlp(x), stock)
    unpatch(mlp)
    assert "gate_options" not in vars(mlp)
    assert len(patch_model(mlp).changed) == 1  # by the self-check, too


def altered(forward: Callable[..., object], **more: object) -> type[nn.Module]:
    """The class with another forward."""
    return type("Altered", (GatedMLP,), {"forward": forward, **more})


stock_forward = GatedMLP.forward


def without_weights() -> nn.Module:
    return GatedMLP().to("meta")


def with_zeros() -> nn.Module:
    mlp = GatedMLP()
    nn.init.zeros_(mlp.down_proj.weight), nn.init.zeros_(mlp.down_proj.bias)
    return mlp


def with_another_width() -> nn.Module:
    mlp = GatedMLP()
    mlp.up_proj = nn.Linear(24, 1, device=DEVICE)  # which would broadcast
    return mlp


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (altered(lambda mlp, x: 1.05 * stock_forward(mlp, x)), ["self-check", "off by 0.0"]),
        # a bound that small gates do not reach
        (altered(lambda mlp, x: mlp.down_proj(F.silu(mlp.gate_proj(x).clamp(max=20)) * mlp.up_proj(x))), ["off by"]),
        (altered(lambda mlp, x: mlp.down_proj(mlp.gate_proj(x) * F.silu(mlp.up_proj(x)))), ["self-check", "off by"]),
        # as any other in evaluation only
        (altered(lambda mlp, x: F.dropout(stock_forward(mlp, x), 0.5, mlp.training)), ["check", "training=True"]),
        (altered(lambda mlp, x: (stock_forward(mlp, x), None)), ["self-check", "tuple"]),
        (altered(lambda mlp, x: 1 / 0), ["self-check", "ZeroDivisionError"]),
        (altered(lambda mlp, x, residual=0: stock_forward(mlp, x) + residual), ["x, residual"]),
        (altered(stock_forward, __call__=lambda mlp, x: nn.Module.__call__(mlp, x) + 1), ["__call__"]),
        (without_weights, ["self-check", "meta", "classes"]),
        (with_zeros, ["self-check", "zero", "classes"]),
        (with_another_width, ["up_proj", "(1, 24)"]),
        (functools.partial(GatedMLP, None), ["act", "NoneType"]),
        (functools.partial(GatedMLP, F.gelu), ["act", "gelu"]),
        (functools.partial(GatedMLP, F.mish), ["act", "mish"]),
        (functools.partial(GatedMLP, options=3), ["options"]),
    ],
)
def test_a_class_that_computes_something_else_is_left_alone(make, facts):
    mlp = make().to(torch.bfloat16 if "off by" in facts else torch.float32)
    kind, attributes = type(mlp), dict(vars(mlp))
    report = patch_model(mlp)
    (left,) = report.left_alone
    assert report.changed == ()
    assert all(fact in left.reason for fact in facts), left.reason
    assert type(mlp) is kind
    assert vars(mlp) == attributes


def test_a_classes_name_that_no_mlp_has():
    model = stock_model("Llama")
    before = repr(model)
    with pytest.raises(ValueError, match="SlicedMPL") as raised:
        patch_model(model, classes=["LlamaMLP", "SlicedMPL"])
    assert "the model has LlamaMLP" in str(raised.value)
    assert repr(model) == before
    with_another_class(model)
    for _ in range(2):  # also of a model that is patched already
        patch_model(model, classes=["SlicedMLP"])


def test_further_classes_on_the_callers_word():
    stock = stock_model("Llama")
    model = copy.deepcopy(stock).to("meta")
    with_another_class(model)
    assert len(patch_model(model, classes=["SlicedMLP"]).changed) == 2
    model.load_state_dict(stock.state_dict(), assign=True)
    model.model.rotary_emb = stock.model.rotary_emb  # whose buffers are in no state_dict
    assert_same_results(logits_loss_gradients(model), stock)


def test_modules_of_ones_own_the_model_itself_and_shared_modules():
    report = patch_model(nn.ModuleDict({"mlp": FusedSwiGLUMLP(4, 6), "glu": FusedSwiGLU(4, 6)}))
    assert report.changed == ()
    assert [left.path for left in report.left_alone] == ["mlp"]
    mlp = first_mlp(stock_model("Llama"))
    assert [change.path for change in patch_model(nn.ModuleList([mlp, mlp])).changed] == ["0"]
    assert [change.path for change in unpatch(mlp).changed] == [""]


def test_an_adapter_that_comes_later_is_never_passed_over():
    stock, model = stock_and_patched("Llama")
    for seed, owner in enumerate((stock, model)):
        torch.manual_seed(seed)
        first_mlp(owner).up_proj = Adapter(first_mlp(owner).up_proj)
    with pytest.raises(TypeError, match=r"up_proj: .* Adapter is not a plain torch.nn.Linear; .* or unpatch the model"):
        model(TOKEN_IDS)
    unpatch(model)
    first_mlp(model).up_proj.load_state_dict(first_mlp(stock).up_proj.state_dict())
    assert torch.equal(model(TOKEN_IDS).logits, stock(TOKEN_IDS).logits)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((3,), {}, TypeError, r"model: expected a torch.nn.Module, got int"),
        ((nn.Linear(2, 2),), {"classes": "LlamaMLP"}, TypeError, r"classes: expected a collection .*'LlamaMLP'"),
        ((nn.Linear(2, 2),), {"classes": [nn.Linear]}, TypeError, r"classes: expected names .*'torch.nn.*Linear'"),
        ((nn.Linear(2, 2),), {"save": "all"}, ValueError, r"save: expected one of .*, got 'all'"),
        ((nn.Linear(2, 2),), {"weight_gard": "none"}, TypeError, r"weight_gard"),
    ],
)
def test_bad_input(arguments, options, error, message):
    before = repr(arguments)
    with pytest.raises(error, match=message):
        patch_model(*arguments, **options)
    assert repr(arguments) == before
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, got list"):
        unpatch([])


def loss_curve(model: nn.Module, steps: int) -> torch.Tensor:
    """Losses of a model that learns one batch by heart."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(3, model.config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimiser.step()
        losses.append(loss.detach().double())
    return torch.stack(losses)


@pytest.mark.gpu
def test_training_in_bf16_gives_the_same_loss_curve():
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 4, "head_dim": 64}
    in_fp32 = stock_model("Llama", vocab_size=1024, max_position_embeddings=64, **sizes)
    stock = copy.deepcopy(in_fp32).bfloat16()
    patched = copy.deepcopy(stock)
    patch_model(patched)
    truth, eager, got = (loss_curve(model, steps=20) for model in (in_fp32, stock, patched))
    assert truth[-1] < 0.9 * truth[0], "the model does not learn; the comparison would be hollow"
    bf16_step = torch.finfo(torch.bfloat16).eps * truth.max()
    assert (got - truth).abs().max() <= 2 * (eager - truth).abs().max() + bf16_step
