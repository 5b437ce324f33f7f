"""Batches: a pure function of seed and step, so that every implementation sees the same and a resumed run goes on."""

from __future__ import annotations

import functools
import gzip
import math
import os
import platform
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from swiglu_bench.spec.errors import BadInput

Batch = tuple[Tensor, Tensor]
IDX_FILES = (
    "train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte",
)  # fmt: skip
TEXT_BYTES = 8 << 20
HELD_OUT_BATCHES = 8


class Data(Protocol):
    """What a model is trained and judged on."""

    @property
    def about(self) -> str:
        """What it is, in a few words."""
        ...

    def batch(self, seed: int, step: int) -> Batch:
        """Inputs and targets of one step."""
        ...

    def held_out(self) -> Iterator[tuple[Batch, int]]:
        """Batches of the same size that are never trained on, and how many rows of each count: the last is padded."""
        ...


@dataclass(frozen=True)
class Images:
    """Images as rows of [pixels], and their labels."""

    about: str
    train: Batch
    test: Batch
    size: int
    """Images in a batch."""

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches only."""
        return len(self.train[0]) // self.size

    def batch(self, seed: int, step: int) -> Batch:
        """The epochs' orders are shuffled by the seed."""
        epoch, number = divmod(step, self.steps_per_epoch)
        chosen = _order(len(self.train[0]), seed, epoch)[number * self.size : (number + 1) * self.size]
        chosen = chosen.to(self.train[0].device)
        return self.train[0][chosen], self.train[1][chosen]

    def held_out(self) -> Iterator[tuple[Batch, int]]:
        """All test images."""
        count = len(self.test[0])
        for start in range(0, count, self.size):
            rows = torch.arange(start, start + self.size, device=self.test[0].device) % count
            yield (self.test[0][rows], self.test[1][rows]), min(self.size, count - start)


@dataclass(frozen=True)
class Text:
    """Bytes as tokens; a batch is pieces of [sequence] from random places, inputs and targets alike."""

    about: str
    tokens: Tensor
    sequence: int
    size: int
    """Pieces in a batch."""

    @property
    def _trained(self) -> int:
        """The last tenth is held out."""
        return len(self.tokens) * 9 // 10

    def batch(self, seed: int, step: int) -> Batch:
        """Places are drawn from seed and step."""
        generator = torch.Generator().manual_seed(_mixed(seed, step))
        starts = torch.randint(self._trained - self.sequence, (self.size,), generator=generator)
        return self._pieces(starts.tolist())

    def held_out(self) -> Iterator[tuple[Batch, int]]:
        """Pieces side by side, from the beginning of the held-out part."""
        room = (len(self.tokens) - self._trained) // (self.sequence * self.size)
        for number in range(min(HELD_OUT_BATCHES, room)):
            first = self._trained + number * self.sequence * self.size
            yield self._pieces(list(range(first, first + self.sequence * self.size, self.sequence))), self.size

    def _pieces(self, starts: list[int]) -> Batch:
        pieces = torch.stack([self.tokens[start : start + self.sequence] for start in starts]).long()
        return pieces, pieces


def digits(size: int, device: torch.device) -> Images:
    """scikit-learn's bundled images: 1437 to train on and 360 held out, split by a fixed seed.

    Raises BadInput without scikit-learn.
    """
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
    return _images(about, (inputs[:1437], labels[:1437]), (inputs[1437:], labels[1437:]), size)


def mnist(folder: Path | None, size: int, device: torch.device) -> Images:
    """MNIST from IDX files, gzipped or not, where torchvision keeps them: FOLDER/MNIST/raw.

    Raises BadInput for a file that is missing or not whole.
    """
    if folder is None:
        raise BadInput(f"The task mnist needs --data FOLDER, with {_expected(Path('FOLDER'))}.")
    train_x, train_y, test_x, test_y = (torch.from_numpy(_idx(folder, name)) for name in IDX_FILES)
    for (images, labels), names in zip(
        ((train_x, train_y), (test_x, test_y)), (IDX_FILES[:2], IDX_FILES[2:]), strict=True
    ):
        if len(images) != len(labels) or not len(images) or int(labels.max()) > 9:
            raise BadInput(
                f"--data: {names[0]} has {len(images)} images and {names[1]} {len(labels)} labels; "
                "expected one label of 0 to 9 for each image."
            )

    def ready(images: Tensor, labels: Tensor) -> Batch:
        return images.flatten(1).float().div(127.5).sub(1).to(device), labels.long().to(device)

    about = f"MNIST from {folder}, {len(train_x)} images to train on, {len(test_x)} held out"
    return _images(about, ready(train_x, train_y), ready(test_x, test_y), size)


def text(file: Path | None, sequence: int, size: int, device: torch.device) -> Text:
    """A file's bytes, or the sources of Python's standard library. Raises BadInput where there are too few."""
    if file is None:
        about = f"the sources of Python {platform.python_version()}'s standard library"
        content = bytearray()
        for path in sorted(Path(os.__file__).parent.glob("*.py")):
            content += path.read_bytes()
    else:
        about = str(file)
        try:
            content = bytearray(file.read_bytes())
        except OSError as error:
            raise BadInput(f"--data: {file} cannot be read: {error.strerror}; give a text file.") from None
    content = content[:TEXT_BYTES]
    least = 11 * sequence * size
    if len(content) < least:
        raise BadInput(f"--data: {about} has {len(content)} bytes; at least {least} are needed. Give a longer file.")
    tokens = torch.frombuffer(content, dtype=torch.uint8).to(device)
    return Text(f"{about}, {len(tokens):,} bytes, the last tenth held out", tokens, sequence, size)


def _images(about: str, train: Batch, test: Batch, size: int) -> Images:
    if len(train[0]) < size:
        raise BadInput(f"There are {len(train[0])} images to train on, fewer than a batch of {size}; take a smaller.")
    return Images(about, train, test, size)


def _idx(folder: Path, name: str) -> np.ndarray:
    """One IDX file: two zero bytes, the type 8 (bytes), the number of dimensions, big-endian sizes, the bytes."""
    plain = folder / "MNIST" / "raw" / name
    path = next((one for one in (plain, plain.with_name(f"{name}.gz")) if one.is_file()), None)
    if path is None:
        raise BadInput(f"--data: {plain} is not there, nor {name}.gz; expected {_expected(folder)}.")
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        zeros, kind, dimensions = struct.unpack_from(">HBB", content)
        sizes = struct.unpack_from(f">{dimensions}I", content, 4)
    except OSError as error:
        raise BadInput(f"--data: {path} cannot be read: {error.strerror or error}.") from None
    except (EOFError, struct.error, gzip.zlib.error) as error:  # type: ignore[attr-defined]
        raise BadInput(f"--data: {path} is not a whole IDX file: {error}; expected {_expected(folder)}.") from None
    wanted = 3 if "images" in name else 1
    start = 4 + 4 * dimensions
    if (zeros, kind, dimensions) != (0, 8, wanted) or len(content) - start != math.prod(sizes):
        raise BadInput(
            f"--data: {path} is not a whole IDX file of bytes in {wanted} dimensions; expected {_expected(folder)}."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(sizes).copy()


def _expected(folder: Path) -> str:
    return f"{', '.join(IDX_FILES)}, each as it is or with .gz, in {folder / 'MNIST' / 'raw'}"


@functools.lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(_mixed(seed, epoch)))


def _mixed(seed: int, number: int) -> int:
    """One seed of two numbers, other for neighbours of either."""
    return (seed * 1_000_003 + number) % 2**63
