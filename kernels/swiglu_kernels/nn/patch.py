"""patch_model: put the fused op into the MLPs of a Hugging Face model that exists already; unpatch: take it out again.

A module is patched by giving it another class, as fully_shard does: optimisers, tied weights and references to it stay
valid. `LAYOUTS` says which arrangements are known, and by class name which forwards are known to compute just that. Any
other class of such an arrangement has to pass a self-check first. Nothing here imports transformers.
"""

import dataclasses
import functools
import inspect
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from swiglu_kernels.nn import modules
from swiglu_kernels.nn.experts_interface import NAMES, gate_of, register_experts, takes_part
from swiglu_kernels.nn.gates import gate_of_mlp
from swiglu_kernels.ops.experts import fp8_experts
from swiglu_kernels.ops.fp8 import operation as fp8
from swiglu_kernels.ops.fp8.choice import experts_pay, pays_from, where_it_pays
from swiglu_kernels.ops.fp8.kept_codes import KeptCodes
from swiglu_kernels.ops.gate.formula import PLAIN, Formula
from swiglu_kernels.runtime.backend import backend_for
from swiglu_kernels.runtime.checks import KERNEL_DTYPES
from swiglu_kernels.runtime.precision import float32_dot_precision


@dataclasses.dataclass(frozen=True)
class Layout:
    """One arrangement of an MLP's submodules, the fused class for it, and the classes known to compute just that."""

    gated: tuple[str, ...]
    down: str
    fused: type[modules.FusedModule]
    classes: frozenset[str]

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of all linear layers."""
        return (*self.gated, self.down)


_OF_LLAMA = frozenset({"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"})
LAYOUTS = (
    Layout(("gate_proj", "up_proj"), "down_proj", modules.FusedSwiGLUMLP, _OF_LLAMA),
    Layout(("gate_up_proj",), "down_proj", modules.FusedSwiGLUPackedMLP, frozenset({"Phi3MLP"})),
)
OTHER_NAMES = frozenset({"w1", "w2", "w3"})
"""What the three projections are called in models that no layout describes."""
ACTIVATION_NAMES = ("act_fn", "activation_fn", "act", "activation")
"""Where an MLP has its activation; the first that is there counts."""
ACTIVATION_CLASSES = dict.fromkeys(("SiLU", "SiLUActivation"), "silu") | dict.fromkeys(
    ("GELUTanh", "PytorchGELUTanh", "NewGELUActivation", "FastGELUActivation"), "gelu_tanh"
)
CHECK_REACH = (1.0, 10.0, 100.0)
"""Largest gate of each token in the self-check: a forward that bounds what it computes shows on the last."""
_STOCK_CLASS = "_class_before_patch"
_STOCK_EXPERTS = "_experts_implementation_before_patch"
_CODES = "_codes"
"""Where a module has its `KeptCodes`."""
_OWN_ATTRIBUTES = frozenset({"options", "gate_options", "tensor_parallel", _STOCK_CLASS, _CODES})


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
    notes: tuple[str, ...] = ()
    """What else there is to know: that nothing looks like an MLP, or that nothing is gained on this device."""

    def __str__(self) -> str:
        done = [(change.path, f"{change.old_class} -> {change.new_class}") for change in self.changed]
        done += [(module.path, f"{module.class_name} left alone: {module.reason}") for module in self.left_alone]
        lines = [f"{path or '(the model)'}: {what}" for path, what in done]
        counts = f"changed {len(self.changed)}, left alone {len(self.left_alone)}"
        return "\n  ".join([counts, *lines, *self.notes])


def patch_model(
    model: nn.Module, *, classes: Collection[str] = (), weight_grad: str = "auto", save: str = "auto",
    input_grad: str = "auto", precision: str = "bf16", keep_codes: bool = False,
    accumulate_into_main_grad: bool = False, tokens: int | None = None,
) -> PatchReport:  # fmt: skip
    """Let the gated MLPs of a model run on the fused op, in place.

    Known are the MLPs of Hugging Face's Llama, Mistral, Qwen2, Qwen3 and Phi-3. Any other module with `gate_proj`,
    `up_proj` and `down_proj`, or a packed `gate_up_proj` and `down_proj`, all plain torch.nn.Linear, is taken if its
    forward shows one of the gates that `swiglu_glu` has (`nn/gates.py`) and it passes a self-check: a few tokens
    through its own forward, in both training modes, and through the fused module agree within what their dtype rounds.
    Experts of transformers 5 run on `swiglu_experts`: the model's experts implementation is set to "swiglu_kernels".
    Other experts whose weights are stacked in one tensor are left alone, and the report names them.

    Parameters, state_dict, hooks on the MLP and training mode are untouched, so a checkpoint saved before or after
    loads into the stock model and back. Load weights first: the self-check needs them. Patch before parallelize_module
    (with `parallel.SwiGLUParallel`), fully_shard, DistributedDataParallel and torch.compile; adapters that wrap the
    projections exclude it.

    Args:
        model: any module; every module below it is looked at.
        classes: names of classes in the model whose forward is `down_proj(act_fn(gate_proj(x)) * up_proj(x))` (or
            Phi-3's) and nothing else. Their attributes are checked, but their forward is trusted without the
            self-check, for example because the weights are on the meta device, or all zero.
        weight_grad, save, input_grad: see `swiglu_glu`; with save="input", experts recompute gate and up, too.
        precision: "bf16" (operands as they are), "fp8-rowwise" or "fp8-blockwise": see `swiglu_mlp_fp8`. An MLP whose
            sizes are no multiples of 16 is left alone then, and so are such experts (see `swiglu_experts`), with
            "fp8-blockwise" all.
        keep_codes: with fp8, quantise weights once until they change: `keep_codes()` of the modules.
        accumulate_into_main_grad: of MLPs, see `swiglu_glu`; experts of transformers have gradients as ever.
        tokens: of a call; with fp8, the report names the layers for which fp8 does not pay at so many.

    Returns:
        What changed, and what looks like a gated MLP or its experts and was left alone, with the reason (in a second
        call, all); and that nothing is gained on a device without kernels.

    Raises:
        TypeError: model is not a torch.nn.Module, or classes is a string or holds anything else.
        ValueError: an option has an unknown value, keep_codes is given without fp8, no MLP of the model has a class
            named in classes, or precision asks for fp8 where the device has none. The model is then as it was.
    """
    _check_model(model)
    if isinstance(classes, str):
        raise TypeError(f"classes: expected a collection of class names, got the string {classes!r}")
    if others := [name for name in classes if not isinstance(name, str)]:
        raise TypeError(f"classes: expected names of classes, as strings, got {others[0]!r}")
    options = modules.Options(weight_grad, save, input_grad, precision, accumulate_into_main_grad)
    if keep_codes and not options.recipe:
        raise ValueError(f"keep_codes: expected False with precision={precision!r}, which quantises nothing, got True")
    candidates = list(_candidates(model))
    _check_classes(classes, [module for _, module, _ in candidates])
    experts = [(path, module) for path, module in model.named_modules() if takes_part(module)]
    if options.recipe:
        taken = [module for _, module, layout in candidates if layout is not None]
        _check_fp8_devices(taken + [module for _, module in experts if options.precision in fp8_experts.PRECISIONS])
    changed, left_alone = [], []
    for path, module, layout in candidates:
        name = type(module).__name__
        reason = _why_not_layout(module) if layout is None else next(_reasons(module, layout, classes, options), None)
        if layout is None or reason is not None:
            left_alone.append(LeftAlone(path, name, reason or ""))
            continue
        module.__dict__ |= _fused_attributes(module, layout, options)
        module.__class__ = layout.fused
        changed.append(Changed(path, name, layout.fused.__name__))
    reasons = _set_experts(model, experts, options)
    for path, module in experts:
        name = type(module).__name__
        if path in reasons:
            left_alone.append(LeftAlone(path, name, reasons[path]))
            continue
        changed.append(Changed(path, name, f"{name}, {_implementation(module)}"))
    patched = {change.path: model.get_submodule(change.path) for change in changed}
    for module in patched.values() if keep_codes else ():
        vars(module)[_CODES] = KeptCodes()
    notes = [*_why_not_paying(patched, options, tokens), *_without_kernels(patched.values())]
    if not candidates and not experts:
        known = "; or ".join(", ".join(layout.projections) for layout in LAYOUTS)
        notes.append(f"no module of {type(model).__name__} has the projections of a gated MLP: {known}")
    return PatchReport(tuple(changed), tuple(left_alone), tuple(notes))


def _why_not_paying(patched: dict[str, Any], options: modules.Options, tokens: int | None) -> list[str]:
    """Say for each kind of layer in which fp8 takes longer than bf16 at so many tokens where it pays."""
    found: dict[str, list[str]] = {}
    if not options.recipe or tokens is None:
        return []
    for path, module in patched.items():
        if takes_part(module):
            slots = getattr(module.config, "num_experts_per_tok", 1)
            rows = tokens * slots / len(module.gate_up_proj)
            if not experts_pay(rows, slots, module.down_proj.shape[2]):
                found.setdefault(f"does not pay in a forward with {rows:.0f} rows for each expert", []).append(path)
            continue
        sizes = tuple(module.down_proj.weight.shape)
        for kind in ("forward", "step"):
            least = pays_from(options.recipe, kind == "step", *sizes)
            if least is None or tokens < least:
                where = where_it_pays(options.recipe, kind == "step", *sizes)
                found.setdefault(f"pays {where} in a {kind} of {sizes[0]} x {sizes[1]}", []).append(path)
    return [f"{options.precision} at {tokens} tokens: it {why}: {', '.join(paths)}" for why, paths in found.items()]


def _without_kernels(patched: Iterable[nn.Module]) -> list[str]:
    """Say on which devices nothing is gained."""
    devices = {next(module.parameters()).device for module in patched}
    found = sorted(str(device) for device in devices if device.type != "meta" and backend_for(device) == "torch")
    what = (
        f"nothing is gained on {', '.join(found)}: the backend there is torch, PyTorch's own operations; the kernels "
        "run on an NVIDIA GPU of compute capability 8.0 or newer, with Triton"
    )
    return [what] if found else []


def _implementation(module: Any) -> str:
    return f"experts_implementation={module.config._experts_implementation!r}"


def _set_experts(model: nn.Module, experts: list[tuple[str, nn.Module]], options: modules.Options) -> dict[str, str]:
    """Set the implementation of a model's experts, by path, where all of them can have it; return why the others not.

    It is the model's configuration that names it, so that all of a model are set, or none.
    """
    owners: list[tuple[str, Any]] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}." if outer else "") for outer, _ in owners)
        if hasattr(module, "set_experts_implementation") and not inside:
            owners.append((path, module))
    reasons = {path: reason for path, module in experts if (reason := _why_not_experts(module, options)) is not None}
    if not reasons and not owners:
        reasons = dict.fromkeys((path for path, _ in experts), "there is no model of transformers around it")
    if reasons or not experts:
        other = next(iter(reasons), "")
        return {path: reasons.get(path, f"{other} of the same model cannot be replaced") for path, _ in experts}
    register_experts()
    name = NAMES[options.precision, options.save == "input"]
    for _, owner in owners:
        owner.__dict__[_STOCK_EXPERTS] = _experts_implementation(owner)
        owner.set_experts_implementation(name)
    return {
        path: "its model cannot be set to another experts implementation"
        for path, module in experts
        if module.config._experts_implementation != name  # type: ignore[union-attr]
    }


def _experts_implementation(owner: Any) -> Any:
    by_part = getattr(owner, "get_experts_implementation", None)
    return owner.config._experts_implementation if by_part is None else by_part()


def _why_not_experts(module: Any, options: modules.Options) -> str | None:
    if module.config._experts_implementation in NAMES.values():
        return f"it already has {_implementation(module)}"
    if options.weight_grad == "none":
        return "weight_grad='none' is not for experts: freeze their parameters with requires_grad_(False)"
    if options.recipe:
        if options.precision not in fp8_experts.PRECISIONS:
            return f"precision={options.precision!r} is not for experts"
        weights, depth = (module.gate_up_proj, module.down_proj), 1 if module.is_transposed else 2
        if reason := _why_not_in_fp8("its weights are", weights[0], *(weight.shape[depth] for weight in weights)):
            return reason
    for name, weight in module.named_parameters(recurse=False):
        if type(weight) is not nn.Parameter or weight.dtype not in KERNEL_DTYPES:
            return f"{name} is a {type(weight).__name__} of {weight.dtype}, not a plain one of the kernels' dtypes"
    gate = gate_of(module)
    return gate if isinstance(gate, str) else None


def _why_not_in_fp8(whose: str, weight: torch.Tensor, *sizes: int) -> str | None:
    """Say why weights like this one, of layers with hidden, intermediate and hidden_out features, are not for fp8."""
    if weight.dtype not in fp8.DTYPES:
        return f"{whose} {weight.dtype}, fp8 products are for bfloat16 and float16"
    return fp8.why_not_sizes(tuple(zip(("hidden", "intermediate", "hidden_out"), sizes, strict=False)))


def unpatch(model: nn.Module) -> PatchReport:
    """Give the modules that `patch_model` changed their own class back; without such modules nothing happens.

    The model is the one given to `patch_model`, a part of it, a copy, or something around it. Projections are left as
    they are now. A patched module that was given yet another class since, by fully_shard for one, is left alone, and so
    is one that is split over ranks.

    Raises:
        TypeError: model is not a torch.nn.Module.
    """
    _check_model(model)
    changed, left_alone = [], []
    for _, owner in [named for named in model.named_modules() if _STOCK_EXPERTS in named[1].__dict__]:
        if split := [each for each in owner.named_modules() if getattr(each[1], "expert_parallel", None)]:
            reason = "its other implementations do not know that its experts are split over ranks"
            left_alone += [LeftAlone(path, type(module).__name__, reason) for path, module in split]
            continue
        owner.set_experts_implementation(owner.__dict__.pop(_STOCK_EXPERTS))
        parts = set(map(id, owner.modules()))
        for path, module in model.named_modules():
            if takes_part(module) and id(module) in parts:
                name = type(module).__name__
                module.__dict__.pop(_CODES, None)
                changed.append(Changed(path, f"{name}, swiglu_kernels", f"{name}, {_implementation(module)}"))
    for path, module in model.named_modules():
        stock = module.__dict__.get(_STOCK_CLASS)
        if stock is None:
            continue
        name = type(module).__name__
        if getattr(module, "tensor_parallel", None) is not None:
            reason = f"{stock.__name__} would not add up what its ranks compute: it is split over them"
        elif not any(type(module) is layout.fused for layout in LAYOUTS):
            reason = f"it was {stock.__name__} and got this class after patch_model"
        else:
            module.__class__ = stock
            for attribute in ("options", "gate_options", _STOCK_CLASS, _CODES):
                module.__dict__.pop(attribute, None)
            changed.append(Changed(path, name, stock.__name__))
            continue
        left_alone.append(LeftAlone(path, name, reason))
    return PatchReport(tuple(changed), tuple(left_alone))


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")


def _check_classes(classes: Collection[str], candidates: list[nn.Module]) -> None:
    """Raise where a name is that of no candidate, of no class above it, and of none that was patched."""
    kinds = {module.__dict__.get(_STOCK_CLASS, type(module)) for module in candidates}
    if absent := sorted(set(classes) - {base.__name__ for kind in kinds for base in kind.__mro__}):
        found = ", ".join(sorted(kind.__name__ for kind in kinds)) or "no MLP at all"
        raise ValueError(f"classes: no MLP of the model is of class {', '.join(absent)}; the model has {found}")


def _fused_attributes(module: nn.Module, layout: Layout, options: modules.Options) -> dict[str, Any]:
    attributes = {_STOCK_CLASS: type(module), "options": options}
    gate = _gate(module, layout) or PLAIN
    changed = {name: value for name, value in gate.options.items() if value != PLAIN.options[name]}
    return {**attributes, "gate_options": changed} if changed else attributes


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module, Layout | None]]:
    """Yield the modules that have the projections of a layout, and with None those that have them in another way."""
    for path, module in model.named_modules():
        for layout in LAYOUTS:
            if all(isinstance(module._modules.get(name), nn.Module) for name in layout.projections):
                yield path, module, layout
                break
        else:
            if takes_part(module):
                continue
            if _stacked(module) or set(module._modules) >= OTHER_NAMES:
                yield path, module, None


def _stacked(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the module's own weights that hold several experts each."""
    own = module._parameters.items()
    weights: dict[str, torch.Tensor] = {name: weight for name, weight in own if weight is not None and weight.dim() > 2}
    return weights if "down_proj" in weights or "expert" in type(module).__name__.lower() else {}


def _why_not_layout(module: nn.Module) -> str:
    stacked = ", ".join(f"{name} {list(weight.shape)}" for name, weight in _stacked(module).items())
    if stacked:
        return f"its experts are stacked in {stacked}; what is patched has a torch.nn.Linear for each projection"
    known = " or ".join(", ".join(layout.projections) for layout in LAYOUTS)
    return f"its projections are called {', '.join(sorted(OTHER_NAMES))}; what is patched calls them {known}"


def _check_fp8_devices(taken: list[nn.Module]) -> None:
    for device in {parameter.device for module in taken for parameter in module.parameters()}:
        if device.type != "meta" and (reason := fp8.why_not(device)) is not None:
            raise ValueError(f"precision: {reason}; patch the model where it will run, or leave precision out")


def _reasons(module: nn.Module, layout: Layout, classes: Collection[str], options: modules.Options) -> Iterator[str]:
    """Yield reasons to leave a module alone; after the first the next ones have no meaning."""
    linears: dict[str, Any] = {name: getattr(module, name) for name in layout.projections}
    if isinstance(module, modules.FusedModule):
        advice = "; unpatch first to change options" if _STOCK_CLASS in module.__dict__ else ""
        yield f"already fused ({module.extra_repr()}){advice}"
    if "forward" in module.__dict__:
        yield "its forward was replaced"
    for name, linear in linears.items():
        if (reason := modules.why_not_plain(linear)) is not None:
            yield f"{name}: {reason}"
        # A subclass of Parameter or Tensor is quantised, sharded (patch first) or otherwise not what it seems.
        if type(linear.weight) is not nn.Parameter:
            yield f"{name}: its weight is a {type(linear.weight).__name__}, not a plain torch.nn.Parameter"
        if linear.weight.dtype not in KERNEL_DTYPES:
            yield f"{name}: its weight is {linear.weight.dtype}, the kernels compute in float32, float16 and bfloat16"
    if len({(linear.weight.dtype, linear.weight.device) for linear in linears.values()}) > 1:
        yield "its projections differ in dtype or device"
    where, known = _activation(module)
    if further := (set(module._modules) - {*linears, where}) | set(module._parameters) | set(module._buffers):
        yield f"it has more than the projections and the activation: {', '.join(sorted(further))}"
    if taken := sorted(_OWN_ATTRIBUTES.intersection(vars(module))):
        yield f"the fused module needs these of its attributes for itself: {', '.join(taken)}"
    # Older transformers computed the MLP in slices then.
    if (getattr(getattr(module, "config", None), "pretraining_tp", None) or 1) > 1:
        yield "config.pretraining_tp is above 1"
    activation = getattr(module, str(where), None)
    if isinstance(activation, nn.Module):
        if (reason := modules.why_not_bare(activation)) is not None:
            yield f"{where}: {reason}"
        if known is None and {*activation.parameters(), *activation.buffers()}:
            yield f"{where}: its activation has parameters or buffers"
    if _gate(module, layout) is None:
        own = getattr(activation, "__name__", type(activation).__name__)
        what = f"{where}: its activation is {own}, not SiLU or the tanh approximation of GELU"
        if where is None:
            what = f"it has no activation named {', '.join(ACTIVATION_NAMES)}"
        yield f"{what}, and its forward shows none of the kernels' gates"
    gated, down = [linears[name].weight for name in layout.gated], linears[layout.down].weight
    if options.recipe:
        sizes = gated[0].shape[1], down.shape[1], down.shape[0]
        if (reason := _why_not_in_fp8(f"{layout.down}: its weight is", down, *sizes)) is not None:
            yield reason
    if type(module).__name__ in layout.classes.union(classes):
        return
    if len({weight.shape for weight in gated}) > 1 or sum(len(weight) for weight in gated) != 2 * down.shape[1]:
        shapes = ", ".join(str(tuple(weight.shape)) for weight in (*gated, down))
        yield f"the weights of {', '.join(layout.projections)} do not fit together: {shapes}"
    if type(module).__call__ is not nn.Module.__call__:
        yield "its class has its own __call__"
    takes = list(inspect.signature(type(module).forward).parameters)[1:]
    if len(takes) != 1:
        yield f"its forward takes {', '.join(takes) or 'nothing'}, not one tensor"
    if (reason := _why_not_same(module, layout)) is not None:
        yield reason


def _activation(module: nn.Module) -> tuple[str | None, str | None]:
    """Return the name of the attribute that holds the activation, and which of the kernels' activations it is."""
    name = next((name for name in ACTIVATION_NAMES if hasattr(module, name)), None)
    activation = None if name is None else getattr(module, name)
    if activation is F.silu:
        return name, "silu"
    if isinstance(activation, nn.GELU) and activation.approximate == "tanh":
        return name, "gelu_tanh"
    if isinstance(activation, functools.partial) and (activation.func, activation.args) == (F.gelu, ()):
        return name, "gelu_tanh" if activation.keywords == {"approximate": "tanh"} else None
    return name, ACTIVATION_CLASSES.get(type(activation).__name__) if isinstance(activation, nn.Module) else None


def _gate(module: nn.Module, layout: Layout) -> Formula | None:
    """Return the gate that a module's forward shows; else that of its activation, which the self-check may refuse."""
    _, known = _activation(module)
    shown = gate_of_mlp(module, layout.gated, layout.down)
    return Formula(known) if shown is None and known is not None else shown


def _why_not_same(module: nn.Module, layout: Layout) -> str | None:
    """Run the self-check: a few tokens through the module's forward and the fused one; nothing of it remains."""
    first, down = getattr(module, layout.gated[0]).weight, getattr(module, layout.down).weight
    if first.is_meta:
        return "the self-check needs weights, but these are on the meta device; load them first, or name it in classes"
    # Each rounds h, gate and up on its way, and both sum in fp32, in any order.
    in_tf32 = first.dtype == torch.float32 and float32_dot_precision() == "tf32"
    rounding = 2**-10 if in_tf32 else torch.finfo(first.dtype).eps
    tolerance = 2 * rounding + sum(down.shape) ** 0.5 * 2**-22
    cuda = [first.device] if first.device.type == "cuda" else []
    with torch.no_grad(), torch.autocast(first.device.type, enabled=False), torch.random.fork_rng(cuda):
        try:
            x = _tokens(first[: down.shape[1]])
            new = _twin(module, layout.fused, _fused_attributes(module, layout, modules.Options())).forward(x.clone())
            for training in (False, True):
                old = _twin(module, type(module), {"training": training}).forward(x.clone())
                if (reason := _difference(old, new, tolerance)) is not None:
                    return f"the self-check, with training={training}: {reason}"
        except Exception as error:
            return f"the self-check: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None


def _twin(module: nn.Module, kind: type[nn.Module], attributes: dict[str, Any]) -> Any:
    """Return a module of another class, or of other attributes, that shares everything else."""
    twin = object.__new__(kind)
    twin.__dict__ |= module.__dict__ | attributes
    return twin


def _tokens(w_gate: torch.Tensor) -> torch.Tensor:
    """Return tokens [2, 3, hidden], the same ones for the same weights, that reach CHECK_REACH in the gate."""
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(2, len(CHECK_REACH), w_gate.shape[1], generator=generator, device="cpu").to(w_gate)
    largest = F.linear(x, w_gate).float().abs().amax(-1, keepdim=True)
    reach = torch.tensor(CHECK_REACH, device=x.device)[:, None]
    return (x.float() * torch.where(largest > 0, reach / largest, 1.0)).to(x.dtype)


def _difference(old: object, new: torch.Tensor, tolerance: float) -> str | None:
    """Say how the outputs of two modules differ; tokens whose own result overflows are not compared."""
    if not isinstance(old, torch.Tensor):
        return f"its forward returns a {type(old).__name__}, not a tensor"
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        return f"its forward returns {list(old.shape)} in {old.dtype}, the fused one {list(new.shape)} in {new.dtype}"
    finite = old.isfinite().all(-1)
    if not finite.any() or not old[finite].any():
        return "its output is zero or not finite, which proves nothing; load its weights first, or name it in classes"
    sizes, errors = (rows[finite].double().norm(dim=-1) for rows in (old, old.double() - new.double()))
    off = (errors / sizes).max().item()
    if not off <= tolerance:
        return f"its output is off by {off:.2g} of its size from that of the fused module, tolerance {tolerance:.2g}"
    return None
