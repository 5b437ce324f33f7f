"""Tiny models of transformers with experts, randomly initialised, on `swiglu_experts`, held against the stock model."""

import copy
import os
from typing import Any

import pytest
import torch
from accuracy import DEVICE
from torch import nn

from swiglu_kernels import FusedSwiGLUExperts, patch_model, register_experts, unpatch
from swiglu_kernels.nn.experts_interface import takes_part
from swiglu_kernels.ops.fp8 import operation as fp8

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # every model here is made from a config
transformers = pytest.importorskip("transformers", minversion="5.0")

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 12, "head_dim": 8,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DEEPSEEK = {
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_hidden_layers": 2, "q_lora_rank": 8,
    "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
FAMILIES = {
    "Mixtral": {},
    "Qwen3Moe": {},
    "DeepseekV3": DEEPSEEK,
    "GptOss": {"layer_types": ["full_attention"], "swiglu_limit": 0.5},
    "Olmoe": {},
    "Glm4Moe": {"first_k_dense_replace": 0},
}
TOKEN_IDS = torch.randint(3, 32, (2, 5), generator=torch.Generator().manual_seed(0)).to(DEVICE)


def stock_model(family: str, **sizes: int) -> Any:
    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family] | sizes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(DEVICE)
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.set_experts_implementation("eager")
    return model


def loss_and_gradients(model: Any, call: Any = None) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = (model if call is None else call)(input_ids=TOKEN_IDS, labels=TOKEN_IDS, use_cache=False).loss
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"loss": loss.detach(), **gradients}


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(expected)
    for name, value in got.items():
        size = expected[name].abs().max().item()
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5 * size, msg=name)


def of_mixtral(report: Any) -> Any:
    """What a report says of Mixtral's experts, which were left alone."""
    (left,) = [left for left in report.left_alone if left.class_name == "MixtralExperts"]
    return left


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient(family):
    stock = stock_model(family)
    patched = copy.deepcopy(stock)
    report = patch_model(patched, save="input" if family == "Olmoe" else "auto")
    experts = [path for path, module in stock.named_modules() if takes_part(module)]
    assert {change.path for change in report.changed} >= set(experts), report
    assert not any(left.path in experts for left in report.left_alone)
    assert_same(loss_and_gradients(patched), loss_and_gradients(stock))
    assert {left.path for left in patch_model(patched).left_alone} >= set(experts)
    unpatch(patched)
    assert patched.config._experts_implementation == "eager"
    assert list(patched.state_dict()) == list(stock.state_dict())


def test_generate_save_and_load(tmp_path):
    stock = stock_model("Mixtral").eval()
    patched = copy.deepcopy(stock)
    patch_model(patched)
    options = {"max_new_tokens": 3, "do_sample": False}
    expected = stock.generate(TOKEN_IDS[:, :3], **options)
    assert torch.equal(patched.generate(TOKEN_IDS[:, :3], **options), expected)
    patched.save_pretrained(tmp_path)
    loaded = type(stock).from_pretrained(tmp_path, experts_implementation="swiglu_kernels").to(DEVICE)
    assert loaded.config._experts_implementation == "swiglu_kernels"
    for name, value in type(stock).from_pretrained(tmp_path).to(DEVICE).state_dict().items():
        assert torch.equal(value, stock.state_dict()[name]), name
    assert torch.equal(loaded.generate(TOKEN_IDS[:, :3], **options), expected)


def test_compiles_without_a_graph_break():
    register_experts()
    model = stock_model("GptOss")
    expected = loss_and_gradients(model)
    model.set_experts_implementation("swiglu_kernels")  # by transformers' own call; its gate was never looked at
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same(loss_and_gradients(model, compiled), expected)


@pytest.mark.skipif(fp8.why_not(DEVICE) is not None, reason=f"{fp8.why_not(DEVICE)}")
def test_forward_products_in_fp8():
    stock = stock_model("Mixtral", intermediate_size=32).bfloat16()
    patched = copy.deepcopy(stock)
    report = patch_model(patched, precision="fp8-rowwise")
    assert patched.config._experts_implementation == "swiglu_kernels_fp8_rowwise", report
    expected, got = loss_and_gradients(stock)["loss"], loss_and_gradients(patched)["loss"]
    assert got != expected
    torch.testing.assert_close(got, expected, rtol=0.1, atol=0)
    unpatch(patched)
    patched.config.num_experts_per_tok = 1
    notes = patch_model(patched, precision="fp8-rowwise", keep_codes=True, tokens=1000).notes
    assert any("does not pay in a forward with 250 rows for each expert" in note for note in notes), notes
    patched.config.num_experts_per_tok = 2
    for _ in range(2):
        assert loss_and_gradients(patched)["loss"] == got
    assert all(module._codes._held for module in patched.modules() if "_codes" in vars(module))
    unpatch(patched)
    assert patched.config._experts_implementation == "eager"
    for options, model, reason in (
        ({"precision": "fp8-blockwise"}, patched, "precision='fp8-blockwise' is not for experts"),
        ({"precision": "fp8-rowwise"}, stock_model("Mixtral").bfloat16(), "multiple of 16 as intermediate, got 24"),
        ({"precision": "fp8-rowwise"}, stock_model("Mixtral", intermediate_size=32), "its weights are torch.float32"),
    ):
        assert reason in of_mixtral(patch_model(model, **options)).reason


def relu_gate(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, -1)
    return gate.relu() * up


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [("has_post_expert_norm", True, "normalised"), ("_apply_gate", relu_gate, "none of the gates")],
)
def test_experts_of_another_kind_are_left_alone(attribute, value, reason):
    model = stock_model("Mixtral")
    setattr(model.model.layers[0].mlp.experts, attribute, value)
    assert reason in of_mixtral(patch_model(model)).reason
    assert model.config._experts_implementation == "eager"
    register_experts()
    model.set_experts_implementation("swiglu_kernels")
    with pytest.raises(ValueError, match=reason):
        model(input_ids=TOKEN_IDS)


def test_a_module_takes_the_parameters_of_a_model():
    theirs = stock_model("Mixtral").model.layers[0].mlp.experts
    ours = FusedSwiGLUExperts(16, 24, 4, device=DEVICE)
    ours.load_state_dict(theirs.state_dict())
    x, index = torch.randn(3, 16).to(DEVICE), torch.tensor([[0, 1], [3, 2], [1, 1]], device=DEVICE)
    weights = torch.rand(3, 2).to(DEVICE)
    torch.testing.assert_close(ours(x, index, weights), theirs(x, index, weights))
    assert torch.equal(ours(x, index, weights, shared=torch.neg), ours(x, index, weights) - x)
    assert ours.backend in repr(ours)
