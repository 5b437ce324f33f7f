"""Machines with GPUs that are not here."""

import dataclasses

import torch

from swiglu_bench.machine import machine

CPU = machine.describe(torch.device("cpu"))


def a_gpu(index: int, **changes: object) -> machine.Machine:
    facts = {"host": "a", "device": "NVIDIA H200", "device_type": "cuda", "gpu_index": index}
    return dataclasses.replace(CPU, **(facts | {"gpu_uuid": f"GPU-{index}"} | changes))  # type: ignore[arg-type]
