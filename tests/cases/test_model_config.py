"""Shapes from configs written as transformers writes them: the fields are those of the named models' config.json."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from swiglu_bench.cases import files
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.shapes import ShapeFile, load_shapes, split_over

LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "hidden_act": "silu"}
MIXTRAL = LLAMA | {"num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_MOE = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "hidden_act": "silu",
    "num_experts": 128, "num_experts_per_tok": 8, "mlp_only_layers": [],
}  # fmt: skip
DEEPSEEK_V3 = {
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "hidden_act": "silu",
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3,
}  # fmt: skip
QWEN2_MOE = QWEN3_MOE | {"shared_expert_intermediate_size": 5632, "num_experts": 60, "num_experts_per_tok": 4}
GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "hidden_act": "silu",
    "num_local_experts": 32, "num_experts_per_tok": 4, "swiglu_limit": 7.0,
}  # fmt: skip
LLAMA4 = {
    "text_config": {
        "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "hidden_act": "silu",
        "num_local_experts": 16, "num_experts_per_tok": 1,
    },
}  # fmt: skip


def write(folder: Path, config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    return file


def complaint(text: str) -> str:
    with pytest.raises(BadInput) as caught:
        load_shapes(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, {"": (4096, 14336, None, None)}),
        ({"text_config": LLAMA, "vision_config": {}}, {"": (4096, 14336, None, None)}),
        (MIXTRAL, {"": (4096, 14336, 8, 2)}),
        (QWEN3_MOE, {"": (2048, 768, 128, 8)}),
        (QWEN2_MOE, {"": (2048, 768, 60, 4), "-shared": (2048, 5632, None, None)}),
        (DEEPSEEK_V3, {"": (7168, 2048, 256, 8), "-dense": (7168, 18432, None, None),
                       "-shared": (7168, 2048, None, None)}),
        (GPT_OSS, {"": (2880, 2880, 32, 4)}),
        (LLAMA4, {"": (5120, 8192, 16, 1), "-dense": (5120, 16384, None, None)}),
    ],
)  # fmt: skip
def test_blocks_of_models(tmp_path: Path, config: Any, expected: dict[str, tuple[int | None, ...]]) -> None:
    found = dict(files.blocks(write(tmp_path / "my-model", config)))
    names = ("hidden", "intermediate", "experts", "top_k")
    assert {
        name.removeprefix("my-model"): tuple(fields.get(one) for one in names) for name, fields in found.items()
    } == expected
    gpt_oss = config.get("model_type") == "gpt_oss"
    assert (found["my-model"].get("limit"), found["my-model"].get("interleaved")) == (
        (7.0, True) if gpt_oss else (None,) * 2
    )


def test_a_file_a_folder_and_a_model_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    file = write(tmp_path / "cache" / "models--Qwen--Tiny-1B" / "snapshots" / "0123", LLAMA)
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda name, _: str(file) if name == "Qwen/Tiny-1B" else None)
    write(tmp_path / "tiny", LLAMA).with_name("other.json").write_text(json.dumps(LLAMA))
    monkeypatch.chdir(tmp_path)
    words = (
        "tiny",
        f"{tmp_path}/tiny",
        f"{tmp_path}/tiny/config.json",
        f"{tmp_path}/tiny/other.json",
        "Qwen/Tiny-1B",
        str(file),
    )
    assert [shape.name for word in words for shape in load_shapes(word)] == ["tiny", "tiny", "tiny", "other"] + 2 * [
        "Tiny-1B"
    ]
    (shape,) = load_shapes("Qwen/Tiny-1B")
    assert (shape.hidden, shape.intermediate) == (4096, 14336)
    assert "hidden_size" in shape.source
    assert "Hugging Face cache" in complaint("Qwen/Other")


@pytest.mark.skipif("experts" not in ShapeFile.model_fields, reason="shapes have no experts")
def test_a_mixture_is_a_shape_with_experts(tmp_path: Path) -> None:
    experts, dense, _ = load_shapes(str(write(tmp_path / "deepseek", DEEPSEEK_V3)))
    assert (experts.name, dense.name) == ("deepseek", "deepseek-dense")
    assert getattr(experts, "experts").count == 256  # noqa: B009


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ([], "hidden_size"), ({}, "hidden_size"), (LLAMA | {"hidden_act": "gelu"}, "'gelu'"),
        ({"hidden_size": 8, "hidden_act": "silu"}, "intermediate_size"), (LLAMA | {"hidden_size": -1}, "hidden"),
        (LLAMA | {"intermediate_size": [8, 16]}, "intermediate"),
    ],
)  # fmt: skip
def test_what_is_no_swiglu(tmp_path: Path, config: Any, word: str) -> None:
    assert word in complaint(str(write(tmp_path / "model", config)))


def test_what_is_no_config(tmp_path: Path) -> None:
    assert "no file" in complaint(str(tmp_path / "absent.json"))
    assert "no file" in complaint(str(tmp_path))
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    assert "JSON" in complaint(str(tmp_path / "broken.json"))


def test_a_model_that_transformers_writes(tmp_path: Path) -> None:
    """The fields are read as the library names them today."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.Qwen3Config(**sizes).save_pretrained(tmp_path / "dense")
    assert dict(files.blocks(tmp_path / "dense" / "config.json"))["dense"]["intermediate"] == 48
    transformers.Qwen3MoeConfig(
        **sizes, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
    ).save_pretrained(tmp_path / "moe")
    found = dict(files.blocks(tmp_path / "moe" / "config.json"))["moe"]
    assert (found["intermediate"], found["experts"], found["top_k"]) == (16, 4, 2)


def test_a_share_of_tensor_parallelism(tmp_path: Path) -> None:
    shapes = load_shapes(str(write(tmp_path / "llama", LLAMA)))
    (share,) = split_over(shapes, 8)
    assert (share.name, share.hidden, share.intermediate) == ("llama-tp8", 4096, 1792)
    assert split_over(shapes, 1) == shapes
    with pytest.raises(BadInput, match="14336"):
        split_over(shapes, 3)


def test_the_sizes_are_the_weights_of_the_model() -> None:
    """What the suite calls intermediate is the rows of gate_proj."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(hidden_size=16, intermediate_size=24, num_attention_heads=2)
    with torch.device("meta"):
        mlp = transformers.models.llama.modeling_llama.LlamaMLP(config)
    assert tuple(mlp.gate_proj.weight.shape) == (24, 16)
