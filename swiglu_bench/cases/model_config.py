"""Shapes from a Hugging Face config.json: a file, a folder, or a model in the local cache. No torch, no network.

A dense model has one shape. Of a mixture of experts the shape has `experts` and `top_k`; its dense layers and its
shared expert, where it has them, are shapes of their own.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swiglu_bench.cases.errors import BadInput

GATES = ("silu", "swish", "swiglu")
COUNTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_k", "moe_topk")


def config_file(word: str) -> Path | None:
    """The config.json that a word of `--shapes` means; None where it means none.

    Raises BadInput for a model that is not in the cache.
    """
    if word.endswith(".json") or os.path.isdir(word):
        file = word if word.endswith(".json") else os.path.join(word, "config.json")
        if not os.path.isfile(file):
            raise BadInput(f"--shapes: there is no file {file!r}; give the config.json of a model.")
        return Path(file)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", word) or word.endswith((".yaml", ".yml")):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        raise BadInput(
            f"--shapes: {word!r} is looked up by huggingface_hub, which is not installed; install it, or give a file."
        ) from None
    try:
        found = try_to_load_from_cache(word, "config.json")
    except ValueError:  # what is no name of a model
        found = None
    if not isinstance(found, str):
        raise BadInput(
            f"--shapes: there is no file {word!r}, and no model of that name in the local Hugging Face cache; run "
            f"'hf download {word} config.json', or give a file."
        )
    return Path(found)


def model_name(file: Path) -> str:
    """What to call the shapes of a config.json: the model's name in the cache, else the folder's or the file's."""
    cached = next((part for part in reversed(file.parts) if part.startswith("models--")), None)
    if cached:
        return cached.rpartition("--")[2]
    return file.absolute().parent.name if file.name == "config.json" else file.stem


def blocks(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each kind of feed-forward block that a config.json describes: its name, and the fields of a shape's YAML file.

    Raises BadInput where it describes none that is a SwiGLU.
    """
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{file}: cannot be read as JSON: {error}.") from None
    if isinstance(config, dict) and "hidden_size" not in config:
        config = config.get("text_config", config)  # of a model that sees images too
    if not isinstance(config, dict) or "hidden_size" not in config:
        raise BadInput(f"{file}: it has no hidden_size; give the config.json of a Hugging Face language model.")
    gate = config.get("hidden_act") or config.get("hidden_activation")
    if gate not in GATES:
        raise BadInput(
            f"{file}: its hidden_act is {gate!r}, which is not SwiGLU's silu; give its sizes as HIDDENxINTERMEDIATE "
            "to measure SwiGLU at them."
        )

    def block(suffix: str, width: str, times: int = 1, **more: Any) -> tuple[str, dict[str, Any]]:
        if width not in config:
            raise BadInput(f"{file}: it has no {width}; give its sizes as HIDDENxINTERMEDIATE.")
        size = config[width] * times if isinstance(config[width], int) else config[width]
        source = f"{name}, {file.name} (hidden_size, {width}{f' x {times}' if times > 1 else ''})"
        return name + suffix, {"hidden": config["hidden_size"], "intermediate": size, "source": source, **more}

    name = model_name(file)
    count = next((config[name] for name in COUNTS if config.get(name)), 0)
    if not count:
        yield block("", "intermediate_size")
        return
    top_k = next((config[name] for name in CHOSEN if config.get(name)), None)
    width = "moe_intermediate_size" if config.get("moe_intermediate_size") else "intermediate_size"
    of_gpt_oss = {"bias": True, "limit": config.get("swiglu_limit", 7.0), "alpha": 1.702, "interleaved": True}
    yield block("", width, experts=count, top_k=top_k, **of_gpt_oss if config.get("model_type") == "gpt_oss" else {})
    dense = "intermediate_size_mlp" if "intermediate_size_mlp" in config else "intermediate_size"
    if config.get("first_k_dense_replace") or config.get("mlp_only_layers") or dense != "intermediate_size":
        yield block("-dense", dense)
    if config.get("shared_expert_intermediate_size"):
        yield block("-shared", "shared_expert_intermediate_size")
    elif isinstance(config.get("n_shared_experts"), int) and config["n_shared_experts"] > 0:
        yield block("-shared", width, config["n_shared_experts"])
