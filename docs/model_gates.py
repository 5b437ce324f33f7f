"""The gates that transformers' models use, and whether the kernels have them: the table of docs/gates.md.

`make gates` imports every model file of the transformers that is installed, builds each of its gated MLPs and experts
in small from the model's default configuration, and asks `patch_model`. ARGS="NAME ..." takes these models alone, and
prints their table without writing it.
"""

import ast
import contextlib
import importlib
import inspect
import itertools
import logging
import math
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import nn

from swiglu_kernels import patch_model
from swiglu_kernels.nn import experts_interface
from swiglu_kernels.nn.experts_interface import takes_part
from swiglu_kernels.nn.gates import LIMITS, gate_of_mlp, gate_shown
from swiglu_kernels.ops.gate.formula import PLAIN, Formula

DOCUMENT, BEGIN, END = Path(__file__).with_name("gates.md"), "<!-- made by `make gates` -->", "<!-- end -->"
PROJECTIONS = {
    ("gate_proj", "up_proj"): "down_proj", ("gate_up_proj",): "down_proj", ("wi_0", "wi_1"): "wo", ("w1", "w3"): "w2",
    ("input_linear",): "output_linear", ("Wi",): "Wo",
}  # fmt: skip
"""What the projections of gated MLPs are called, and that after the gate."""
SMALL = 64
"""What larger sizes of a configuration are set to."""


def classes_of(file: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the classes of a model file that have projections of a gated MLP, and which."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            named = set(re.findall(r"self\.(\w+)\s*=\s*[^\n]*(?:Linear|Parameter|Conv1D)", ast.unparse(node)))
            gated = next((gated for gated, down in PROJECTIONS.items() if named.issuperset((*gated, down))), None)
            if gated:
                yield node.name, gated


def value_for(name: str) -> Any:
    """Return a value for a parameter or an attribute that has none by default."""
    named = {"dropout": 0.0, "bias": False, "act": "silu", "layer_idx": 0}
    return next((value for part, value in named.items() if part in name), SMALL)


def configurations(module: ModuleType, kind: type, fill: bool) -> Iterator[Any]:
    """Yield the configurations that a class may be built from, the likeliest first, all in small; `fill` what lacks."""
    package = importlib.import_module(module.__name__.replace("modeling_", "configuration_"))
    named = [name for name in vars(package) if name.endswith("Config") and name != "PreTrainedConfig"]
    annotation = str(inspect.signature(kind).parameters["config"])
    alike = {
        name: sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(name, kind.__name__, strict=False))
        )
        for name in named
    }
    read = re.findall(r"config\.(\w+)", inspect.getsource(kind))
    for name in sorted(named, key=lambda name: (name not in annotation, -alike[name], "Text" not in name, name)):
        with contextlib.suppress(Exception):
            config = getattr(package, name)()
            for key in [*vars(config), *read]:
                with contextlib.suppress(Exception):
                    value = getattr(config, key, None)
                    if isinstance(value, int) and value > SMALL:
                        setattr(config, key, SMALL)
                    elif fill and key in read and (value is None or isinstance(value, list)):
                        setattr(config, key, value_for(key))
            yield config


def built(module: ModuleType, kind: type) -> nn.Module | None:
    """Build a class from the first configuration that fits; None where none does."""
    parameters = inspect.signature(kind).parameters
    given = {name: value_for(name) for name, own in parameters.items() if own.default is own.empty}
    fitting = (config for fill in (False, True) for config in configurations(module, kind, fill))
    for config in fitting if "config" in parameters else (None,):
        with contextlib.suppress(Exception):
            made = kind(**given | ({} if config is None else {"config": config}))
            for parameter in made.parameters():
                nn.init.normal_(parameter, std=0.1)
            for name in LIMITS:  # some layers of Step-3.7 have a limit, its configuration has none by default
                if getattr(made, name, None) == math.inf:
                    setattr(made, name, 7.0)
            return made.eval()
    return None


def gate_of(module: nn.Module, gated: tuple[str, ...]) -> Formula | None:
    """Return the gate that a module of a model applies."""
    if not hasattr(module, "_apply_gate"):
        return gate_of_mlp(module, gated, PROJECTIONS[gated])
    with contextlib.suppress(Exception):
        return gate_shown(module, lambda gate, up: module._apply_gate(torch.cat((gate, up), -1)))
    return None


def name_of(module: nn.Module, formula: Formula | None) -> str:
    """Name a gate, with the attributes that hold its numbers instead of the numbers of one model."""
    if formula is None:
        activation = getattr(module, "act_fn", getattr(module, "act", getattr(module, "activation_fn", None)))
        own = getattr(activation, "__name__", type(activation).__name__)
        return "another" if activation is None else f"another, with `{own}`"
    options = {name: value for name, value in formula.options.items() if value != PLAIN.options[name]}
    text = ", ".join(f'{name}="{value}"' if isinstance(value, str) else name for name, value in options.items())
    return f"`{text}`" if text else "SwiGLU"


def outcome(module: nn.Module) -> str:
    """Say what `patch_model` does with a module."""
    if takes_part(module):
        gate = experts_interface.gate_of(module)
        return f"left alone: {gate}" if isinstance(gate, str) else "set through transformers' experts interface"
    report = patch_model(module)
    own = [left.reason for left in report.left_alone if left.path == ""]
    if any(change.path == "" for change in report.changed):
        return "patched"
    if own and "its experts are stacked" in own[0]:
        return "left alone: experts outside of transformers' experts interface"
    if not own or "its projections are called" in own[0]:
        return "left alone: its projections have other names"
    return f"left alone: {own[0].partition(', with training=')[0].partition(', and its forward')[0]}"


def rows(models: list[str]) -> dict[tuple[str, bool, str], set[str]]:
    """Return the classes by gate, whether the kernels have it, and what `patch_model` does."""
    found: dict[tuple[str, bool, str], set[str]] = defaultdict(set)
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        if models and file.parent.name not in models:
            continue
        for name, gated in classes_of(file):
            try:
                module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
                made = built(module, getattr(module, name))
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            if made is None:
                found["not built from a default configuration", False, ""].add(name)
                continue
            formula = gate_of(made, gated)
            found[name_of(made, formula), formula is not None, outcome(made)].add(name)
    return found


def table(models: list[str]) -> str:
    """Return the table as Markdown."""
    lines = ["| gate | kernels | `patch_model` | classes |", "| --- | --- | --- | --- |"]
    for (gate, covered, what), names in sorted(rows(models).items(), key=lambda row: (not row[0][1], -len(row[1]))):
        lines.append(f"| {gate} | {'yes' if covered else 'no'} | {what} | {len(names)}: {', '.join(sorted(names))} |")
    return "\n".join(lines)


def main(models: list[str]) -> None:
    """Print the table of some models, or write that of all into the document."""
    if models:
        print(table(models))
        return
    before, _, after = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    made = f"{BEGIN}\ntransformers {transformers.__version__}:\n\n{table([])}\n{END}"
    DOCUMENT.write_text(before + made + after.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable()
    torch.manual_seed(0)
    main(sys.argv[1:])
