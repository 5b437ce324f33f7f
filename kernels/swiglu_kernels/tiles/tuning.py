"""The tuned choices: read once per process from a file in the user's cache folder, looked up before each launch.

A choice is kept for one GPU model, compute capability, version of torch, of triton and of these kernels, and within it
for one kernel, dtype, bucket of tokens (rounded up to the next power of two), hidden and intermediate size. Where the
file has none, what is shipped (`candidates.shipped`) runs; nothing is ever tuned by the way. `swiglu-bench tune`
measures and writes.

The file is `$XDG_CACHE_HOME/swiglu-kernels/tuning.json` (`~/.cache/...`). The environment variable
SWIGLU_KERNELS_TUNING names another, or is `off`: then none is read.
"""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from swiglu_kernels.runtime import kept, sources
from swiglu_kernels.runtime.backend import Capability, triton
from swiglu_kernels.runtime.shortcuts import plan
from swiglu_kernels.tiles.candidates import KERNELS, TUNED_DTYPES, Choice, TileProblem, bucket, why_illegal
from swiglu_kernels.tiles.rules import Tile

VARIABLE = "SWIGLU_KERNELS_TUNING"
SCHEMA = 1
WHAT = "tuned choices"
INSTEAD = "the shipped tiles are used. `swiglu-bench tune --clear` removes the file."
Key = tuple[str, torch.dtype, int, int, int]
"""Kernel, dtype, bucket of tokens, hidden, intermediate."""


@dataclass(frozen=True)
class TunedMachine:
    """What a choice was measured on."""

    gpu: str
    capability: str
    torch: str
    triton: str
    kernels: str
    """Digest of this package's source files."""

    @property
    def major_minor(self) -> Capability:
        """The compute capability as numbers."""
        major, minor = self.capability.split(".")
        return int(major), int(minor)


@dataclass(frozen=True)
class TunedEntry:
    """One tuned choice, and how it was found."""

    machine: TunedMachine
    kernel: str
    dtype: str
    tokens: int
    """`Problem.kept_for`: the most tokens that it is for; of experts, the rows of the routing's tiles."""
    hidden: int
    intermediate: int
    choice: Choice
    ratio: tuple[float, float, float]
    """Its time / that of the shipped choice: median, and the ends of the 95% interval."""
    at: str
    """UTC, ISO 8601."""

    @property
    def place(self) -> tuple[TunedMachine, str, str, int, int, int]:
        """What there is one choice for."""
        return self.machine, self.kernel, self.dtype, self.tokens, self.hidden, self.intermediate


_tables: dict[torch.device, dict[Key, Choice]] = {}


def lookup(kernel: str, like: torch.Tensor, tokens: int, hidden: int, intermediate: int) -> Choice | None:
    """Return the tuned choice for a launch on the device and in the dtype of a tensor, or None: as shipped.

    `tokens` are, of experts, the rows of the routing's tiles.
    """
    table = _tables.get(like.device)
    if table is None:
        table = _tables[like.device] = _load(like.device)
    if not table:
        return None
    return table.get((kernel, like.dtype, bucket(tokens), hidden, intermediate))


def portable_tile(choice: Choice | None, aligned: bool) -> Tile | None:
    """Return the tile of a portable choice, which holds for aligned tensors, or None."""
    return choice.tile if choice and aligned and choice.schedule == "portable" else None


@contextlib.contextmanager
def forced(device: torch.device, kernel: str, problem: TileProblem, choice: Choice) -> Iterator[None]:
    """Describe the launches of a kernel and problem with this choice, whatever was tuned."""
    before = _tables.get(device)
    _tables[device] = {(kernel, problem.dtype, problem.kept_for, problem.hidden, problem.intermediate): choice}
    try:
        yield
    finally:
        del _tables[device]
        if before is not None:
            _tables[device] = before


def forget() -> None:
    """Read the file again at the next launch, and describe every launch anew."""
    _tables.clear()
    plan.forget()
    kept.warn_once.cache_clear()


def path() -> Path | None:
    """The file, whether it exists or not; None where it is switched off."""
    return kept.path("tuning.json", VARIABLE)


def entries() -> list[TunedEntry]:
    """All choices of the file, of whatever machine; none, with one warning, from a file that is not sound."""
    return kept.read_if_sound(path(), WHAT, _of_content, INSTEAD)


def read(file: Path) -> list[TunedEntry]:
    """All choices of a file; none where there is no file. Raises OSError, and ValueError where it is not sound."""
    return kept.read(file, WHAT, _of_content)


def _of_content(content: dict[str, Any]) -> list[TunedEntry]:
    if content["schema"] != SCHEMA:
        raise ValueError(f"it is not of schema {SCHEMA}")
    return [_entry(**plain) for plain in content["entries"]]


def write(content: Iterable[TunedEntry]) -> Path:
    """Replace the file by these choices, at once; who changes it holds a lock meanwhile. Raises OSError."""
    file = path()
    assert file is not None, "switched off"
    kept.write(file, {"schema": SCHEMA, "entries": [_plain(entry) for entry in content]})
    return file


def _plain(entry: TunedEntry) -> dict[str, Any]:
    plain = asdict(entry)
    del plain["choice"]["why"]
    return plain


def machine_of(device: torch.device) -> TunedMachine | None:
    """What choices for a device are kept under; None for one that nothing is tuned for."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    properties = torch.cuda.get_device_properties(device)
    version = getattr(triton, "__version__", "")
    capability = f"{properties.major}.{properties.minor}"
    return TunedMachine(properties.name, capability, torch.__version__, version, sources.of_kernels())


def digest(device: torch.device) -> str:
    """Name the tuned choices that hold on a device in 16 hexadecimal digits; "" where there are none."""
    table = _load(device)
    lines = sorted(f"{key} {choice}" for key, choice in table.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] if lines else ""


def _load(device: torch.device) -> dict[Key, Choice]:
    """The choices of the file that hold on a device and can run there."""
    found = entries()
    here = machine_of(device) if found else None
    if here is None:
        return {}
    table: dict[Key, Choice] = {}
    for entry in found:
        if entry.machine != here:
            continue
        dtype = getattr(torch, entry.dtype)
        sizes = entry.tokens, entry.hidden, entry.intermediate
        problem = TileProblem(*sizes, dtype, here.major_minor, card=here.gpu)
        if reason := why_illegal(entry.kernel, entry.choice, problem):
            file = path()
            assert file is not None, "it has entries"
            kept.warn_once(file, f"{entry.choice} for {entry.kernel} cannot run ({reason})", INSTEAD)
            return {}
        table[entry.kernel, dtype, entry.tokens, entry.hidden, entry.intermediate] = entry.choice
    return table


def _entry(machine: dict[str, Any], choice: dict[str, Any], ratio: list[float], **plain: Any) -> TunedEntry:
    """An entry from its plain form; raises what Python and this function have against it."""
    tile = Tile(**choice["tile"])
    of_three: Any = tuple(map(float, ratio))
    made = TunedEntry(TunedMachine(**machine), choice=Choice(choice["schedule"], tile), ratio=of_three, **plain)
    sizes = (made.tokens, made.hidden, made.intermediate, *asdict(tile).values())
    of_text = all(isinstance(text, str) for text in (made.dtype, made.choice.schedule))
    if made.kernel not in KERNELS or not of_text or len(made.ratio) != 3:
        raise ValueError(f"not an entry of a kernel: {plain}")
    if getattr(torch, made.dtype, None) not in TUNED_DTYPES:
        raise ValueError(f"nothing is tuned for {made.dtype}")
    if not all(type(size) is int and size > 0 for size in sizes) or made.tokens != bucket(made.tokens):
        raise ValueError(f"invalid sizes: {sizes}")
    if not all(isinstance(text, str) for text in (*asdict(made.machine).values(), made.at)):
        raise ValueError("an invalid machine")
    return made
