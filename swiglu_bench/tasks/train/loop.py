"""A network with an implementation's blocks in it, and its training from one seed, step by step, with checkpoints."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swiglu_bench.rows.training import TrainingStep
from swiglu_bench.tasks.train.blocks import PROJECTIONS, Block, Trainee
from swiglu_bench.tasks.train.data import Batch
from swiglu_bench.tasks.train.model import Experiment, sites


class FittedModel:
    """A network, a trainee's blocks for it, and the optimiser of everything that is trained with these blocks.

    Several may share one network and take turns in it: each is made before the first is installed.
    """

    def __init__(self, experiment: Experiment, trainee: Trainee, network: nn.Module) -> None:
        self.experiment, self.trainee, self.network = experiment, trainee, network
        self._sites = sites(network)
        self.blocks = [
            Block(trainee, experiment.case, {one: getattr(site.mlp, part).weight for one, part in PROJECTIONS.items()})
            for site in self._sites
        ]
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
    """A trainee trained from one seed."""

    def __init__(self, experiment: Experiment, trainee: Trainee, seed: int) -> None:
        torch.manual_seed(seed)  # on every device: the same weights for all trainees
        super().__init__(experiment, trainee, experiment.make())
        self.seed, self.step = seed, 0
        self.install()

    def advance(self) -> TrainingStep:
        """Train one step."""
        began = time.perf_counter()
        rate = self.experiment.learning_rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.learn(self.experiment.data.batch(self.seed, self.step))
        if self.step == 0:
            for block in self.blocks:
                block.check_gradients()
        self.update()
        value = loss.item()
        took_ms = (time.perf_counter() - began) * 1e3
        self.step += 1
        return TrainingStep(self.trainee.name, self.seed, self.step - 1, value, rate, took_ms)

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

    def save(self, path: Path) -> None:
        """Write a checkpoint, completely or not at all."""
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        state = {"step": self.step, "network": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
        try:
            torch.save(state, temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint."""
        state: dict[str, Any] = torch.load(path, map_location=self.experiment.device, weights_only=True)
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
