"""One place where cases run, one at a time: a GPU of a host, or a CPU. And which GPUs of this host `--gpus` means."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.machine import machine, sources
from swiglu_bench.machine.machine import Machine


@dataclass(frozen=True)
class Place:
    """A device that only one case at a time has for itself."""

    number: int
    """Unlike that of any other place of the run, also of one that has gone."""
    machine: Machine
    environment: Mapping[str, str] = field(default_factory=dict)
    """What is other in its processes than in this one: which GPU they see."""

    @property
    def name(self) -> str:
        """For a message."""
        this = self.machine
        if this.device_type == "cpu":
            return f"{this.host} CPU"
        return f"{this.host} GPU {this.gpu_index if this.gpu_index is not None else this.gpu_uuid}"

    @property
    def seat(self) -> str:
        """What stays the same when another process takes over the device."""
        return self.machine.gpu_uuid or f"{self.machine.host} {self.number}"


def check_alike(first: Place, other: Place) -> None:
    """Raise BadInput where rows of the two could not stand in one run: a fingerprint speaks for one kind of machine."""
    for name in (*sources.MACHINE, "tuned_tiles"):
        one, two = getattr(first.machine, name), getattr(other.machine, name)
        if one != two:
            raise BadInput(
                f"{first.name} and {other.name} are not alike: {name} is {one or 'unknown'} and {two or 'unknown'}; "
                "sweep over one kind of machine at a time."
            )


def gpus(text: str) -> list[Place]:
    """The places that `--gpus` names, by indices as `--device cuda:INDEX` has them, or `all`.

    Raises BadInput where they are not there or not alike.
    """
    count = torch.cuda.device_count()
    words = [word.strip() for word in text.split(",")]
    if text.strip() != "all" and not all(re.fullmatch(r"\d{1,4}", word) for word in words):
        raise BadInput(f"--gpus: {text!r} are no GPUs; give indices as 0,1,2,3, or all.")
    if not count:
        raise BadInput("--gpus: this machine has no usable CUDA GPU; leave it out.")
    indices = list(range(count)) if text.strip() == "all" else [int(word) for word in words]
    for index in indices:
        if index >= count:
            there = "there is only GPU 0" if count == 1 else f"there are only GPUs 0 to {count - 1}"
            raise BadInput(f"--gpus: {index} was asked for, but {there}.")
    if len(set(indices)) < len(indices):
        raise BadInput(f"--gpus: {text} names a GPU twice; name each once.")
    found = [_gpu(index) for index in indices]
    for place in found:
        check_alike(found[0], place)
    return found


def _gpu(index: int) -> Place:
    this = machine.describe(torch.device("cuda", index))
    return Place(index, this, {"CUDA_VISIBLE_DEVICES": visible(index, this.gpu_uuid, os.environ)})


def visible(index: int, uuid: str, environment: Mapping[str, str]) -> str:
    """CUDA_VISIBLE_DEVICES for a process that is to see just what CUDA calls `index` in this environment.

    A list that is already there says it in its own words (an index, a UUID, an instance of a partitioned GPU). Else it
    is the UUID: CUDA may count in another order than the driver.
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES", "")
    return listed.split(",")[index].strip() if listed.strip() else uuid


def names(places: Sequence[Place]) -> str:
    """All of them in a few words: `4 GPUs`, or `8 GPUs of 2 hosts`."""
    hosts = len({place.machine.host for place in places})
    kind = "CPU process" if places and places[0].machine.device_type == "cpu" else "GPU"
    plural = "" if len(places) == 1 else "es" if kind.endswith("s") else "s"
    return f"{len(places)} {kind}{plural}" + (f" of {hosts} hosts" if hosts > 1 else "")
