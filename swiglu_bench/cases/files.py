"""Files that users hand over, read and checked: YAML of shapes and sweeps, a model's config.json, a recorded workload.

Errors name the file and the line, or the entry. No torch, no network.
"""

import csv
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import pydantic
import yaml
from pydantic import Field

from swiglu_bench.cases.errors import BadInput, one_line

Size = Annotated[int, Field(gt=0, le=2**24)]
Model = TypeVar("Model", bound=pydantic.BaseModel)


@dataclass(frozen=True)
class Document(Generic[Model]):
    """A checked file and its syntax tree, which has line numbers."""

    path: Path
    content: Model
    node: yaml.Node = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.path.stem

    def line(self, *location: int | str) -> int:
        """The line of the file that states a key, or an entry of its list."""
        return _line(self.node, location)


def read_yaml(path: Path, choose: Callable[[dict[str, Any]], type[Model]], expected: str) -> Document[Model]:
    """Parse one file by the model that `choose` has for its mapping; `expected` names some of its keys.

    Raises BadInput, which names the file and the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}.") from error
    except yaml.MarkedYAMLError as error:
        place = f"{path}:{error.problem_mark.line + 1}" if error.problem_mark else str(path)
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise BadInput(f"{place}: not valid YAML: {what}.") from error
    except Exception as error:  # not UTF-8, endless nesting; PyYAML raises many types for values such as `!!int x`
        raise BadInput(f"{path}: not valid YAML: {one_line(error)}.") from error
    if not isinstance(node, yaml.MappingNode) or not isinstance(data, dict):
        raise BadInput(f"{path}:1: expected keys such as {expected}; found {_kind(data)}.")
    keys: set[str] = set()
    for key, _ in node.value:
        if key.value in keys:
            raise BadInput(f"{path}:{key.start_mark.line + 1}: {key.value}: the key is given twice.")
        keys.add(key.value)
    try:
        return Document(path, choose(data).model_validate(data), node)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        found = "" if first["type"] == "missing" else f" (found {_found(first['input'])})"
        place = f"{path}:{_line(node, first['loc'])}"
        raise BadInput(f"{place}: {first_of(error, 'the file')}{found}.") from error


def first_of(error: pydantic.ValidationError, whole: str) -> str:
    """The first complaint of a model, with its place in what is given; `whole` names that."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or whole}: {first['msg']}"


def _line(node: yaml.Node | None, location: tuple[int | str, ...]) -> int:
    """Line of the YAML node that a pydantic location names, or of its nearest parent that exists."""
    found = 1
    for part in location:
        if isinstance(node, yaml.MappingNode):
            pair = next((pair for pair in node.value if pair[0].value == str(part)), None)
            if pair is None:
                break
            found, node = pair[0].start_mark.line + 1, pair[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            found = node.start_mark.line + 1
        else:
            break
    return found


def _found(value: Any) -> str:
    """A wrong value in short form, since through aliases a few lines can hold an endless value."""
    if isinstance(value, dict | list | set | tuple):
        return _kind(value)
    if isinstance(value, int) and value.bit_length() > 64:
        return "an integer of more than 64 bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _kind(data: Any) -> str:
    if data is None:
        return "an empty file"
    kinds = {dict: "a mapping", list: "a list", str: "text", int: "a number", float: "a number", bool: "a truth value"}
    return kinds.get(type(data), f"a {type(data).__name__}")


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
    found = None
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(word, "config.json")
    except ImportError:
        where = "huggingface_hub, which is not installed; install it, or give a file"
        raise BadInput(f"--shapes: {word!r} is looked up by {where}.") from None
    except ValueError:  # what is no name of a model
        pass
    if not isinstance(found, str):
        nowhere = f"there is no file {word!r}, and no model of that name in the local Hugging Face cache"
        raise BadInput(f"--shapes: {nowhere}; run 'hf download {word} config.json', or give a file.")
    return Path(found)


def blocks(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each kind of feed-forward block that a config.json describes: its name, and the fields of a shape's YAML file.

    They are called after the model in the cache, else after the folder or the file. Raises BadInput where it describes
    none that is a SwiGLU.
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
        advice = "give its sizes as HIDDENxINTERMEDIATE to measure SwiGLU at them"
        raise BadInput(f"{file}: its hidden_act is {gate!r}, which is not SwiGLU's silu; {advice}.")

    def block(suffix: str, width: str, times: int = 1, **more: Any) -> tuple[str, dict[str, Any]]:
        if width not in config:
            raise BadInput(f"{file}: it has no {width}; give its sizes as HIDDENxINTERMEDIATE.")
        size = config[width] * times if isinstance(config[width], int) else config[width]
        source = f"{name}, {file.name} (hidden_size, {width}{f' x {times}' if times > 1 else ''})"
        return name + suffix, {"hidden": config["hidden_size"], "intermediate": size, "source": source, **more}

    cached = next((part for part in reversed(file.parts) if part.startswith("models--")), "")
    own = file.absolute().parent.name if file.name == "config.json" else file.stem
    name = cached.rpartition("--")[2] or own
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


Workload = Mapping[int, float]
"""How often each token count was seen, by token count, ascending."""

MOST_COUNTS = 32
"""More token counts than these are represented by as many."""
EXPECTED = 'give tokens and weights: JSON such as {"128": 900, "1": 20}, or CSV with the columns tokens and weight'


class WorkloadLine(pydantic.BaseModel, extra="forbid"):
    """One call, or `weight` of them, with so many tokens."""

    tokens: Size
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


def load_workload(file: Path) -> Workload:
    """Read a workload; a line without a weight is one call, and lines with the same token count add up.

    JSON is an object of weights by token count, or a list of token counts or of objects with `tokens` and `weight`; CSV
    has the columns `tokens` and, if it likes, `weight`. Raises BadInput, which names the line, for anything else.
    """
    try:
        text = file.read_text(encoding="utf-8")
        lines = _from_json(text) if file.suffix == ".json" else list(csv.DictReader(text.splitlines()))
    except OSError as error:
        raise BadInput(f"--workload: {file} cannot be read: {error.strerror}; {EXPECTED}.") from None
    except (ValueError, csv.Error) as error:
        raise BadInput(f"--workload: {file} cannot be read: {error}; {EXPECTED}.") from None
    found: dict[int, float] = {}
    for number, given in enumerate(lines, start=1):
        try:
            line = WorkloadLine.model_validate(given)
        except pydantic.ValidationError as error:
            raise BadInput(f"--workload: {file}, entry {number}: {first_of(error, 'entry')}; {EXPECTED}.") from None
        found[line.tokens] = found.get(line.tokens, 0.0) + line.weight
    if not found:
        raise BadInput(f"--workload: {file} has no token counts; {EXPECTED}.")
    return _reduced(dict(sorted(found.items())))


def _from_json(text: str) -> list[Any]:
    data = json.loads(text)
    if isinstance(data, dict):
        return [{"tokens": tokens, "weight": weight} for tokens, weight in data.items()]
    if not isinstance(data, list):
        raise ValueError("it holds neither an object nor a list")
    return [{"tokens": entry} if isinstance(entry, int) else entry for entry in data]


def _reduced(workload: dict[int, float]) -> Workload:
    """At most MOST_COUNTS token counts: of each range of similar ones, the one seen most often stands for all."""
    if len(workload) <= MOST_COUNTS:
        return workload
    ranges: dict[int, list[int]] = {}
    fewest, most = min(workload), max(workload)
    for tokens in workload:
        place = math.log(tokens / fewest) / math.log(most / fewest)
        ranges.setdefault(min(int(MOST_COUNTS * place), MOST_COUNTS - 1), []).append(tokens)
    return {
        max(counts, key=lambda tokens: (workload[tokens], tokens)): sum(workload[tokens] for tokens in counts)
        for counts in ranges.values()
    }
