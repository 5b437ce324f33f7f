"""patch_model: put the fused op into the MLPs of a Hugging Face model that exists already; unpatch: take it out again.

A module is patched by giving it another class, as fully_shard does: the module object stays where it is and keeps its
projections, parameters, hooks, training mode and names, so optimisers, tied weights and references to it stay valid.
`LAYOUTS` says which classes are known. Nothing here imports transformers: classes are known by name, and what the name
promises is checked on the instance. Whatever looks like a SwiGLU MLP and is left alone is reported with the reason.
"""

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

import torch.nn.functional as F
from torch import nn

from swiglu_kernels.calls.checks import KERNEL_DTYPES
from swiglu_kernels.modules import (
    FusedModule,
    FusedSwiGLUMLP,
    FusedSwiGLUPackedMLP,
    Options,
    why_not_bare,
    why_not_plain,
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """One arrangement of an MLP's submodules, the fused class for it, and the classes known to compute just that."""

    gated: tuple[str, ...]
    down: str
    activation: str
    fused: type[FusedModule]
    classes: frozenset[str]

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of all linear layers."""
        return (*self.gated, self.down)


LAYOUTS = (
    Layout(
        gated=("gate_proj", "up_proj"),
        down="down_proj",
        activation="act_fn",
        fused=FusedSwiGLUMLP,
        classes=frozenset({"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"}),
    ),
    Layout(
        gated=("gate_up_proj",),
        down="down_proj",
        activation="activation_fn",
        fused=FusedSwiGLUPackedMLP,
        classes=frozenset({"Phi3MLP"}),
    ),
)
SILU_CLASSES = frozenset({"SiLU", "SiLUActivation"})
_STOCK_CLASS = "_class_before_patch"


@dataclasses.dataclass(frozen=True)
class Changed:
    """A module that has another class now."""

    path: str
    old_class: str
    new_class: str


@dataclasses.dataclass(frozen=True)
class LeftAlone:
    """A module that was a candidate and is as it was."""

    path: str
    class_name: str
    reason: str


@dataclasses.dataclass(frozen=True)
class PatchReport:
    """What `patch_model` or `unpatch` did; `print` it."""

    changed: tuple[Changed, ...]
    left_alone: tuple[LeftAlone, ...]

    def __str__(self) -> str:
        lines = [f"changed {len(self.changed)}, left alone {len(self.left_alone)}"]
        lines += [f"  {one.path or '(the model)'}: {one.old_class} -> {one.new_class}" for one in self.changed]
        lines += [
            f"  {one.path or '(the model)'}: {one.class_name} left alone: {one.reason}" for one in self.left_alone
        ]
        return "\n".join(lines)


def patch_model(
    model: nn.Module,
    *,
    classes: Collection[str] = (),
    weight_grad: str = "auto",
    save: str = "auto",
    input_grad: str = "auto",
) -> PatchReport:
    """Let the SwiGLU MLPs of a model run on the fused op, in place.

    Known are the MLPs of Hugging Face's Llama, Mistral, Qwen2, Qwen3 and Phi-3. Parameters, state_dict, hooks on the
    MLP and training mode are untouched, so a checkpoint saved before or after loads into the stock model and back.
    Patch before parallelize_module (with `parallel.SwiGLUParallel`), fully_shard, DistributedDataParallel and
    torch.compile; adapters that wrap the projections exclude it.

    Args:
        model: any module; every module below it is looked at.
        classes: names of further classes whose forward is `down_proj(act_fn(gate_proj(x)) * up_proj(x))` (or Phi-3's)
            and nothing else. Their attributes are checked, their forward is taken on the caller's word.
        weight_grad: see `swiglu_glu`.
        save: see `swiglu_glu`.
        input_grad: see `swiglu_glu`.

    Returns:
        What changed, and what looks like a SwiGLU MLP and was left alone, with the reason. A second call changes
        nothing and says so.

    Raises:
        TypeError: model is not a torch.nn.Module, or classes is a string.
        ValueError: an option has an unknown value. The model is then as it was.
    """
    _check_model(model)
    if isinstance(classes, str):
        raise TypeError(f"classes: expected a collection of class names, got the string {classes!r}")
    options = Options(weight_grad, save, input_grad)
    changed, left_alone = [], []
    for path, module, layout in _candidates(model):
        name = type(module).__name__
        reason = _why_not(module, layout, layout.classes.union(classes))
        if reason is not None:
            left_alone.append(LeftAlone(path, name, reason))
            continue
        module.__dict__ |= {_STOCK_CLASS: type(module), "options": options}
        module.__class__ = layout.fused
        changed.append(Changed(path, name, layout.fused.__name__))
    return PatchReport(tuple(changed), tuple(left_alone))


def unpatch(model: nn.Module) -> PatchReport:
    """Give the modules that `patch_model` changed their own class back; without such modules nothing happens.

    Projections are left as they are now, also where they were replaced since.

    Args:
        model: the model given to `patch_model`, a part of it, a copy, or something around it.

    Returns:
        What changed. A patched module that was given yet another class since, by fully_shard for one, is left alone,
        and so is one that is split over ranks.

    Raises:
        TypeError: model is not a torch.nn.Module.
    """
    _check_model(model)
    changed, left_alone = [], []
    for path, module in model.named_modules():
        stock = module.__dict__.get(_STOCK_CLASS)
        if stock is None:
            continue
        name = type(module).__name__
        if getattr(module, "tensor_parallel", None) is not None:
            reason = f"{stock.__name__} would not add up what its ranks compute: it is split over them"
            left_alone.append(LeftAlone(path, name, reason))
            continue
        if not any(type(module) is layout.fused for layout in LAYOUTS):
            left_alone.append(LeftAlone(path, name, f"it was {stock.__name__} and got this class after patch_model"))
            continue
        module.__class__ = stock
        del module.__dict__["options"], module.__dict__[_STOCK_CLASS]
        changed.append(Changed(path, name, stock.__name__))
    return PatchReport(tuple(changed), tuple(left_alone))


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module, Layout]]:
    """Yield the modules that have the projections of a layout, each once."""
    for path, module in model.named_modules():
        for layout in LAYOUTS:
            if all(isinstance(module._modules.get(name), nn.Module) for name in layout.projections):
                yield path, module, layout


def _why_not(module: nn.Module, layout: Layout, classes: Collection[str]) -> str | None:
    """Return the first reason to leave a module alone."""
    if isinstance(module, FusedModule):
        advice = "; unpatch first to change options" if _STOCK_CLASS in module.__dict__ else ""
        return f"fused already ({module.extra_repr()}){advice}"
    if "forward" in module.__dict__:
        return "its forward was replaced"
    return (
        _why_not_projections(module, layout)
        or _why_not_class(module, layout, classes)
        or _why_not_activation(module, layout)
    )


def _why_not_projections(module: nn.Module, layout: Layout) -> str | None:
    linears: dict[str, Any] = {name: getattr(module, name) for name in layout.projections}
    for name, linear in linears.items():
        reason = why_not_plain(linear)
        if reason is not None:
            return f"{name}: {reason}"
        # A subclass of Parameter or Tensor is quantised, sharded (patch first) or otherwise not what it seems.
        if type(linear.weight) is not nn.Parameter:
            return f"{name}: its weight is a {type(linear.weight).__name__}, not a plain torch.nn.Parameter"
        if linear.weight.dtype not in KERNEL_DTYPES:
            return f"{name}: its weight is {linear.weight.dtype}, the kernels compute in float32, float16 and bfloat16"
    if len({(linear.weight.dtype, linear.weight.device) for linear in linears.values()}) > 1:
        return "its projections differ in dtype or device"
    return None


def _why_not_class(module: nn.Module, layout: Layout, classes: Collection[str]) -> str | None:
    if type(module).__name__ not in classes:
        known = ", ".join(sorted(classes))
        return f"its forward is unknown (known: {known}; add its name to classes if it computes the same)"
    further = set(module._modules) - {*layout.projections, layout.activation}
    further |= set(module._parameters) | set(module._buffers)
    if further:
        return f"it has more than the projections and the activation: {', '.join(sorted(further))}"
    # Older transformers computed the MLP in slices then.
    if (getattr(getattr(module, "config", None), "pretraining_tp", None) or 1) > 1:
        return "config.pretraining_tp is above 1"
    return None


def _why_not_activation(module: nn.Module, layout: Layout) -> str | None:
    activation = getattr(module, layout.activation, None)
    if activation is F.silu:
        return None
    if not isinstance(activation, nn.Module) or type(activation).__name__ not in SILU_CLASSES:
        name = getattr(activation, "__name__", type(activation).__name__)
        return f"{layout.activation}: its activation is {name}, not SiLU"
    reason = why_not_bare(activation)
    return reason and f"{layout.activation}: {reason}"
