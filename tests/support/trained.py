"""Small things to train: MNIST's files with images that are easy, a decoder of two layers."""

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from specimens import a_summary

from swiglu_bench.cases.cases import Dtype
from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.contenders import CATALOGUE
from swiglu_bench.rows.finished_run import PERMUTED
from swiglu_bench.tasks.train.blocks import Trainee
from swiglu_bench.tasks.train.model import IDX_FILES, Classifier, Experiment, Llama, prepare

CPU = torch.device("cpu")
BY_NAME = {implementation.name: implementation for implementation in CATALOGUE}
SIZES = Classifier(task="mnist", hidden=16, intermediate=24, batch=16, learning_rate=0.01, epochs=2, source="for tests")
NANO = Llama(
    task="llama", hidden=32, intermediate=48, layers=2, heads=2, kv_heads=1, sequence=16, batch=2, learning_rate=0.01,
    steps=4, source="for tests",
)  # fmt: skip


def idx(values: np.ndarray) -> bytes:
    """The content of an IDX file of bytes."""
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.astype(np.uint8).tobytes()


def write_mnist(folder: Path, count: int = 70, zipped: bool = False) -> Path:
    """Images of 4 x 4 whose class is their brightest row and half, in torchvision's layout."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    numbers = np.random.default_rng(0)
    for images, labels in (IDX_FILES[:2], IDX_FILES[2:]):
        classes = numbers.integers(0, 8, count)
        pixels = numbers.integers(0, 60, (count, 8, 2))
        pixels[np.arange(count), classes] += 180
        for name, content in ((images, idx(pixels.reshape(count, 4, 4))), (labels, idx(classes))):
            (raw / (f"{name}.gz" if zipped else name)).write_bytes(gzip.compress(content) if zipped else content)
    return folder


def images(folder: Path, steps: int = 6, dtype: Dtype = Dtype.FLOAT32) -> Experiment:
    """The classifier on such files."""
    return prepare(SIZES, CPU, dtype, data=write_mnist(folder), steps=steps)


def decoder(folder: Path, device: torch.device = CPU, dtype: Dtype = Dtype.FLOAT32, **sizes: int) -> Experiment:
    """The decoder on a small text."""
    text = folder / "text.txt"
    text.write_bytes(b"a rose is a rose is a rose. " * 400)
    return prepare(NANO.model_copy(update=sizes), device, dtype, data=text)


def trainee(name: str, own: Implementation | None = None, **fields: Any) -> Trainee:
    """A built-in implementation, or one of a test's own, that nothing is known of yet."""
    implementation = own or BY_NAME[name]
    return Trainee(implementation, a_summary(name, trains=implementation.trains), **fields)


def permuted() -> Trainee:
    """eager with its intermediate features in another order."""
    return trainee(PERMUTED, BY_NAME["eager"], permuted=True, timed=False)
