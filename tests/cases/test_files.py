"""Shapes from configs as transformers writes them, with the fields of the named models' config.json; and workloads."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from specimens import complaint as refused

from swiglu_bench.cases import files
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.cases.files import MOST_COUNTS, load_workload
from swiglu_bench.cases.shapes import load_shapes, split_over

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


SIZES = ("hidden", "intermediate", "experts", "top_k")


def write(folder: Path, config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    return file


complaint = partial(refused, load_shapes)


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
    sizes = {name: [block.get(size) for size in SIZES] for name, block in found.items()}
    assert {name.removeprefix("my-model"): tuple(of) for name, of in sizes.items()} == expected
    of_gpt_oss = (7.0, True) if config.get("model_type") == "gpt_oss" else (None, None)
    assert (found["my-model"].get("limit"), found["my-model"].get("interleaved")) == of_gpt_oss


def test_a_file_a_folder_and_a_model_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    file = write(tmp_path / "cache" / "models--Qwen--Tiny-1B" / "snapshots" / "0123", LLAMA)
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda name, _: str(file) if name == "Qwen/Tiny-1B" else None)
    write(tmp_path / "tiny", LLAMA).with_name("other.json").write_text(json.dumps(LLAMA))
    monkeypatch.chdir(tmp_path)
    named = {
        "tiny": ["tiny", f"{tmp_path}/tiny", f"{tmp_path}/tiny/config.json"], "other": [f"{tmp_path}/tiny/other.json"],
        "Tiny-1B": ["Qwen/Tiny-1B", str(file)],
    }  # fmt: skip
    for name, words in named.items():
        assert {shape.name for word in words for shape in load_shapes(word)} == {name}
    (shape,) = load_shapes("Qwen/Tiny-1B")
    assert (shape.hidden, shape.intermediate) == (4096, 14336)
    assert "hidden_size" in shape.source
    assert "Hugging Face cache" in complaint("Qwen/Other")


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


# Workloads


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.csv", "tokens,weight\n128,3\n1,0.5\n128,1\n", {1: 0.5, 128: 4}),
        ("a.csv", "tokens\n7\n7\n2\n", {2: 1, 7: 2}),
        ("a.json", '{"1024": 2, "1": 900}', {1: 900, 1024: 2}), ("a.json", "[5, 5, 6]", {5: 2, 6: 1}),
        ("a.json", '[{"tokens": 5}, {"tokens": 5, "weight": 9}]', {5: 10}),
    ],
)  # fmt: skip
def test_workloads(tmp_path: Path, name: str, text: str, expected: dict[int, float]) -> None:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    found = load_workload(file)
    assert found == expected
    assert list(found) == sorted(found)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", ""), ("a.csv", "tokens\n"), ("a.csv", "count\n5\n"), ("a.csv", "tokens\n0\n"),
        ("a.csv", "tokens\nx\n"),
        ("a.csv", "tokens,weight\n5,-1\n"), ("a.csv", "tokens,weight\n5,nan\n"), ("a.csv", "tokens\n5,6\n"),
        ("a.json", "{"), ("a.json", "5"), ("a.json", "[[5]]"), ("a.json", '{"5": "many"}'), ("a.json", "[]"),
        ("a.json", "[5.5]"),
    ],
)  # fmt: skip
def test_bad_workloads(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    for given in (file, tmp_path / "absent.csv"):
        with pytest.raises(BadInput, match=r"^--workload: [^\n]*tokens and weight"):
            load_workload(given)


def test_many_token_counts_are_represented_by_those_seen_most(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_text("tokens\n" + "".join(f"{tokens}\n" for tokens in (*range(1, 3000), *[512] * 9)), encoding="utf-8")
    found = load_workload(file)
    assert len(found) <= MOST_COUNTS
    assert sum(found.values()) == 2999 + 9, "every call counts"
    assert 512 in found
    assert set(found) <= set(range(1, 3000))
