"""A network with an implementation of the registry in place of its SwiGLU blocks, and its training from one seed.

Weights are fp32. In a 16-bit dtype an implementation is built on copies that are made anew before each forward, as
autocast casts what a product reads; their gradients are passed on to the fp32 weights. Each implementation is thus
built and called as the benchmarks do it, whether or not it knows of autocast.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from swiglu_bench.cases.cases import WEIGHTS, Case, Dtype, Scope
from swiglu_bench.cases.errors import one_line
from swiglu_bench.cases.implementation import Implementation, Step
from swiglu_bench.cases.problem import Problem
from swiglu_bench.check.inputs import torch_dtype
from swiglu_bench.measure.clock import DeviceLost, answers
from swiglu_bench.rows.record import Record, Status, row_of
from swiglu_bench.rows.run_folder import OF_STEPS
from swiglu_bench.tasks.train.model import Batch, Experiment, sites

PROJECTIONS = {"w_gate": "gate_proj", "w_up": "up_proj", "w_down": "down_proj"}


@dataclass
class Trainee:
    """An implementation that takes part, and what has been found about it so far."""

    implementation: Implementation
    row: Record
    permuted: bool = False
    """Whether the intermediate features of its blocks are in another order."""
    timed: bool = True
    """Whether its step is timed."""
    seeds: dict[int, Record] = field(default_factory=dict)
    """The row of each seed from which it was trained to the end."""

    @property
    def name(self) -> str:
        """As in the tables."""
        return self.row.implementation

    @property
    def losses(self) -> dict[int, Sequence[float]]:
        """Of every step, by seed."""
        return {seed: row.series["loss"] for seed, row in self.seeds.items()}

    @contextlib.contextmanager
    def may_fail(self, device: torch.device, doing: str) -> Iterator[None]:
        """Turn whatever the implementation raises into its row's error; raises DeviceLost if it broke the device."""
        try:
            yield
        except Exception as error:
            if not answers(device):
                raise DeviceLost(one_line(error)) from error
            self.row.status, self.row.reason = Status.ERROR, f"{doing}: {one_line(error)}."


def why_not(
    implementation: Implementation, case: Case, device_type: str, interpreter: bool, capability: str
) -> str | None:
    """Why it cannot be trained here in blocks of the case, in one sentence; None if it can."""
    if not implementation.scopes & {Scope.MLP, Scope.GLU}:
        return "It computes the activation alone; a block needs the scope mlp or glu."
    if implementation.trains == "nothing":
        return "It has no backward."
    if implementation.backend == "triton" and device_type == "cpu" and not implementation.gpus and not interpreter:
        return "Its Triton kernels need a GPU; --interpret runs them on a CPU, about a thousand times slower."
    refusal = implementation.refuses(_scoped(implementation, case))
    return refusal or implementation.unavailable(device_type, interpreter, capability)


class _Core(nn.Module):
    """What of a block is the implementation's, without the casts of its input and weights."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._call = call

    def forward(self, x: Tensor) -> Tensor:
        return self._call(x)


class Block(nn.Module):
    """x -> down(silu(gate(x)) * up(x)) by an implementation; `weights` are the fp32 parameters it begins with.

    An implementation without a weight layout of its own trains these very parameters.
    """

    def __init__(self, trainee: Trainee, case: Case, weights: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.trains_weights, self._dtype = trainee.implementation.trains == "everything", torch_dtype(case)
        case = _scoped(trainee.implementation, case)
        weights = _permuted(weights) if trainee.permuted else weights
        step, leaves = self._build(trainee.implementation, case, weights)
        own = leaves if step.parameters is not None else {}
        if own and case.dtype is not Dtype.FLOAT32:  # in the same layout, but not rounded
            own = self._build(trainee.implementation, dataclasses.replace(case, dtype=Dtype.FLOAT32), weights)[1]
        if "w_down" not in leaves:
            leaves["w_down"] = self._leaf(weights["w_down"], self._dtype)
        whole = case.scope is Scope.MLP
        self.core = _Core(step.forward if whole else lambda x: functional.linear(step.forward(x), leaves["w_down"]))
        exact = {name: nn.Parameter(value.detach()) for name, value in own.items()}
        self.masters = nn.ParameterDict({name: exact[name] if name in own else weights[name] for name in leaves})
        self._leaves = leaves
        for name, leaf in leaves.items():
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(partial(_pass_gradient, self.masters[name]))

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden], in the dtype of products."""
        flat = x.reshape(-1, x.shape[-1]).to(self._dtype)
        with torch.no_grad():
            for name, leaf in self._leaves.items():
                if leaf.dtype is not torch.float32:
                    leaf.copy_(self.masters[name])
        with torch.autocast(x.device.type, enabled=False):
            return self.core(flat).reshape(x.shape)

    def check_gradients(self) -> None:
        """After a backward: raise RuntimeError where a weight that is to be trained has no gradient."""
        if missing := [name for name, master in self.masters.items() if self.trains_weights and master.grad is None]:
            raise RuntimeError(f"it yields no gradient for {', '.join(missing)}")

    def _build(
        self, implementation: Implementation, case: Case, weights: Mapping[str, Tensor]
    ) -> tuple[Step, dict[str, Tensor]]:
        """The Step built on leaves of the case's dtype, and the leaves that it uses: its own or these."""
        leaves = {name: self._leaf(weights[name], torch_dtype(case)) for name in WEIGHTS[case.scope]}
        step = implementation.build(Problem(case, weights["w_gate"].device, leaves))
        return step, dict(leaves if step.parameters is None else step.parameters)

    def _leaf(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The same memory in fp32, a copy in another dtype."""
        return weight.detach().to(dtype).requires_grad_(self.trains_weights)


def _scoped(implementation: Implementation, case: Case) -> Case:
    """The case at the widest scope that the implementation has."""
    return dataclasses.replace(case, scope=Scope.MLP if Scope.MLP in implementation.scopes else Scope.GLU)


def _permuted(weights: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    gate, up, down = (weights[name].detach() for name in ("w_gate", "w_up", "w_down"))
    order = torch.randperm(len(gate), generator=torch.Generator().manual_seed(1)).to(gate.device)
    permuted = {"w_gate": gate[order], "w_up": up[order], "w_down": down[:, order]}
    return {name: nn.Parameter(weight) for name, weight in permuted.items()}


def _pass_gradient(master: nn.Parameter, leaf: Tensor) -> None:
    assert leaf.grad is not None
    gradient = leaf.grad.to(master.dtype)
    master.grad = gradient if master.grad is None else master.grad + gradient
    leaf.grad = None


class FittedModel:
    """A network, a trainee's blocks for it, and the optimiser of everything that is trained with these blocks.

    Several may share one network and take turns in it: each is made before the first is installed.
    """

    def __init__(self, experiment: Experiment, trainee: Trainee, network: nn.Module) -> None:
        self.experiment, self.trainee, self.network = experiment, trainee, network
        self._sites = sites(network)
        each = [{name: getattr(site.mlp, part).weight for name, part in PROJECTIONS.items()} for site in self._sites]
        self.blocks = [Block(trainee, experiment.case, weights) for weights in each]
        replaced = {id(parameter) for site in self._sites for parameter in site.get_submodule("mlp").parameters()}
        around = [parameter for parameter in network.parameters() if id(parameter) not in replaced]
        trained = [master for block in self.blocks if block.trains_weights for master in block.masters.values()]
        self.parameters = around + trained
        """Those that are trained: around the blocks, and the blocks' own."""
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0, fused=experiment.device.type == "cuda")

    def install(self) -> None:
        """Put the blocks into the network."""
        for site, block in zip(self._sites, self.blocks, strict=True):
            site.mlp = block

    def learn(self, batch: Batch) -> Tensor:
        """Forward and backward: the loss; the gradients are then in the parameters."""
        loss, _ = self.experiment.loss(self.network, batch)
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        """The optimiser's part of a step."""
        if limit := self.experiment.workload.max_gradient_norm:
            nn.utils.clip_grad_norm_(self.parameters, limit)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class SeedTraining(FittedModel):
    """A trainee trained from one seed; its row has a loss, a learning rate and a time for each step so far."""

    def __init__(self, experiment: Experiment, trainee: Trainee, seed: int) -> None:
        torch.manual_seed(seed)  # on every device: the same weights for all trainees
        super().__init__(experiment, trainee, experiment.make())
        self._series: dict[str, list[float]] = {name: [] for name in OF_STEPS}
        self.row = row_of("seeds", {}, implementation=trainee.name, seed=seed, steps=experiment.steps)
        self.row.parameters = sum(parameter.numel() for parameter in self.parameters)
        self.row.series = self._series
        self.install()

    def advance(self) -> float:
        """Train one step; its loss."""
        began, step = time.perf_counter(), len(self._series["loss"])
        rate = self.experiment.learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.learn(self.experiment.data.batch(self.row.seed, step))
        if step == 0:
            for block in self.blocks:
                block.check_gradients()
        self.update()
        value = loss.item()
        for name, figure in zip(OF_STEPS, (value, rate, (time.perf_counter() - began) * 1e3), strict=True):
            self._series[name].append(figure)
        return value

    @torch.no_grad()
    def judge(self) -> tuple[float, float]:
        """Loss and metric over the held-out data."""
        total = right = count = 0.0
        classifies = self.experiment.workload.metric == "accuracy"
        for batch, rows in self.experiment.data.held_out():
            loss, logits = self.experiment.loss(self.network, batch, rows)
            if classifies:
                right += (logits.argmax(-1) == batch[1][:rows]).sum().item()
            total += loss.item() * rows
            count += rows
        mean = total / count
        return mean, right / count if classifies else math.exp(min(mean, 700.0))
