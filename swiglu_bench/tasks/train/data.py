"""Data sets, whose batches are a pure function of seed and step: every implementation sees the same."""

from __future__ import annotations

import functools
import gzip
import os
import platform
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from swiglu_bench.cases.errors import BadInput

Batch = tuple[Tensor, Tensor]
"""Inputs and targets."""
IDX_FILES = (
    "train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte",
)  # fmt: skip
TEXT_BYTES = 8 << 20
HELD_OUT_BATCHES = 8


@dataclass(frozen=True)
class Images:
    """Images as rows of [pixels], and their labels."""

    about: str
    """What they are, in a few words."""
    train: Batch
    test: Batch
    size: int
    """Images in a batch."""

    def __post_init__(self) -> None:
        if self.steps_per_epoch < 1:
            raise BadInput(f"There are {len(self.train[0])} images to train on, fewer than a batch of {self.size}.")

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches only."""
        return len(self.train[0]) // self.size

    def batch(self, seed: int, step: int) -> Batch:
        """The batch of a step; the seed shuffles the order of each epoch."""
        epoch, number = divmod(step, self.steps_per_epoch)
        chosen = _order(len(self.train[0]), seed, epoch)[number * self.size : (number + 1) * self.size]
        chosen = chosen.to(self.train[0].device)
        return self.train[0][chosen], self.train[1][chosen]

    def held_out(self) -> Iterator[tuple[Batch, int]]:
        """All test images in batches of the same size, and how many rows of each count: the last one is padded."""
        count = len(self.test[0])
        for start in range(0, count, self.size):
            rows = torch.arange(start, start + self.size, device=self.test[0].device) % count
            yield (self.test[0][rows], self.test[1][rows]), min(self.size, count - start)


@dataclass(frozen=True)
class Pieces:
    """Bytes as tokens; a batch is pieces of [sequence] from random places, which are both inputs and targets."""

    about: str
    """What it is, in a few words."""
    train: Tensor
    test: Tensor
    sequence: int
    size: int
    """Pieces in a batch."""

    def batch(self, seed: int, step: int) -> Batch:
        """The batch of a step, from places drawn from seed and step."""
        generator = torch.Generator().manual_seed(_mixed(seed, step))
        starts = torch.randint(len(self.train) - self.sequence, (self.size,), generator=generator).tolist()
        pieces = torch.stack([self.train[start : start + self.sequence] for start in starts]).long()
        return pieces, pieces

    def held_out(self) -> Iterator[tuple[Batch, int]]:
        """Batches of adjacent pieces from the beginning of the held-out part; all rows of each count."""
        for tokens in self.test.split(self.sequence * self.size)[:HELD_OUT_BATCHES]:
            if len(tokens) == self.sequence * self.size:
                pieces = tokens.view(self.size, self.sequence).long()
                yield (pieces, pieces), self.size


def digits(size: int, device: torch.device) -> Images:
    """scikit-learn's bundled images, split by a fixed seed. Raises BadInput without scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise BadInput(
            "The task digits needs scikit-learn; install it with: pip install 'swiglu-bench[train]'."
        ) from None
    found = load_digits()
    order = torch.randperm(len(found.data), generator=torch.Generator().manual_seed(0))
    inputs = torch.from_numpy(found.data).float().div(8).sub(1)[order].to(device)
    labels = torch.from_numpy(found.target).long()[order].to(device)
    about = "scikit-learn's digits, 1437 images of 8 x 8 to train on, 360 held out"
    return Images(about, (inputs[:1437], labels[:1437]), (inputs[1437:], labels[1437:]), size)


def mnist(folder: Path | None, size: int, device: torch.device) -> Images:
    """MNIST from torchvision's IDX files, gzipped or not. Raises BadInput for a missing or incomplete one."""
    if folder is None:
        raise BadInput(f"The task mnist needs --data FOLDER, with {_expected(Path('FOLDER'))}.")
    parts = []
    for names in (IDX_FILES[:2], IDX_FILES[2:]):
        images, labels = (torch.from_numpy(_read_idx(folder, name)) for name in names)
        if len(images) != len(labels) or not len(images) or int(labels.max()) > 9:
            raise BadInput(
                f"--data: {names[0]} has {len(images)} images and {names[1]} {len(labels)} labels; "
                "expected one label of 0 to 9 for each image."
            )
        parts.append((images.flatten(1).float().div(127.5).sub(1).to(device), labels.long().to(device)))
    train, test = parts
    about = f"MNIST from {folder}, {len(train[0])} images to train on, {len(test[0])} held out"
    return Images(about, train, test, size)


def text(file: Path | None, sequence: int, size: int, device: torch.device) -> Pieces:
    """A file's bytes, or the sources of Python's standard library. Raises BadInput where there are too few."""
    if file is None:
        about = f"the sources of Python {platform.python_version()}'s standard library"
        content = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    else:
        about = str(file)
        try:
            content = file.read_bytes()
        except OSError as error:
            raise BadInput(f"--data: {file} cannot be read: {error.strerror}; give a text file.") from None
    content = content[:TEXT_BYTES]
    if len(content) < (least := 11 * sequence * size):
        raise BadInput(f"--data: {about} has {len(content)} bytes; at least {least} are needed. Give a longer file.")
    tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
    train, test = tokens.tensor_split([len(tokens) * 9 // 10])
    return Pieces(f"{about}, {len(tokens):,} bytes, the last tenth held out", train, test, sequence, size)


def _read_idx(folder: Path, name: str) -> np.ndarray:
    """One IDX file: two zero bytes, the type 8 (bytes), the number of dimensions, big-endian sizes, the bytes."""
    plain = folder / "MNIST" / "raw" / name
    path = next((file for file in (plain, plain.with_name(f"{name}.gz")) if file.is_file()), None)
    if path is None:
        raise BadInput(f"--data: {plain} is not there, nor {name}.gz; expected {_expected(folder)}.")
    dimensions = 3 if "images" in name else 1
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        kind, *sizes = np.frombuffer(content, ">u4", 1 + dimensions).tolist()
        if kind != 0x800 + dimensions:
            raise ValueError(f"it does not hold bytes in {dimensions} dimension{'s' * (dimensions > 1)}")
        return np.frombuffer(content, np.uint8, offset=4 * (1 + dimensions)).reshape(sizes).copy()
    except OSError as error:
        raise BadInput(f"--data: {path} cannot be read: {error.strerror or error}.") from None
    except (EOFError, ValueError, zlib.error) as error:
        raise BadInput(f"--data: {path} is not a complete IDX file: {error}; expected {_expected(folder)}.") from None


def _expected(folder: Path) -> str:
    return f"{', '.join(IDX_FILES)}, each as it is or with .gz, in {folder / 'MNIST' / 'raw'}"


@functools.lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(_mixed(seed, epoch)))


def _mixed(seed: int, number: int) -> int:
    """One seed made of two numbers, a different one for neighbours of either."""
    return (seed * 1_000_003 + number) % 2**63
