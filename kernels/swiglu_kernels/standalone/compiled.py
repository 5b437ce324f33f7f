"""What the compiler makes of each matrix kernel, on any machine with Triton and without a GPU.

    python -m swiglu_kernels.standalone.compiled [--capability 9.0] [--dtype bfloat16] [--tokens 8192] [--json]
    python -m swiglu_kernels.standalone.compiled --every|--few [--capability 9.0] [--json]

The launches are described on meta tensors with the tiles of the named GPU, so what is compiled is what would run there.
A kernel that takes more shared memory than a program may have is an error, and so is a hand-scheduled one whose wgmmas
wait for registers (`moved`) or for each other (`one_by_one`), whose instructions outgrow their cache (`code_bytes`), or
whose buffers overlap (`allocated_bytes`), whether or not it runs with this Triton.
`--every` takes the kernels of `covering.py` instead of one shape's, as many at a time as there are cores, and `--few`
of each kernel's tiles the one that spills first. With both, a kernel that spills more than `allowed_spill` is an error
as well.
Not under TRITON_INTERPRET=1: interpreted kernels are never compiled.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch

from swiglu_kernels.runtime import compiling
from swiglu_kernels.runtime.backend import INTERPRETING, TRITON_AVAILABLE, Capability, describing_for, triton
from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.standalone.covering import CLAMPED, TITLES, covering, meta, most_demanding
from swiglu_kernels.standalone.workloads import LayerTensors, dense_shapes

FEW_BYTES = 16
"""Of a thread's registers, that some versions of ptxas spill once, outside of a main loop."""
NEIGHBOURS = 60
"""Lines of assembly within which two wgmmas are of one loop."""
READ_AHEAD = {"_down_kernel", "_weighted_sum_kernel"}
"""Kernels that read before they wait, see portable_pairs.py and portable_gemv.py."""
SPILLS = {
    "dX on the fly, 64 tokens, bfloat16": 24,
    "recompute, 128 tokens, bfloat16": 80,
    "recompute, 8192 tokens, bfloat16": 48,
    "dX read, 16 tokens, bfloat16": 24,
    "dW on the fly, 16 tokens, bfloat16, unaligned": 24,
    "dW read, 16 tokens, float32": 16,
    "experts by hand, h": 32,
    "experts by hand, h, rows copied": 48,
    "fp8 experts by hand, h": 24,
    # The first product's tile, while the second is summed up; of loads in loops 10 in 1000 instructions. The next
    # smaller tile, of 64 rows, spills nothing, and reads a third more.
    "fp8 rowwise dX, 8192 tokens, for 8.9": 112,
}
"""Bytes that Triton 3.8 or 3.9 spills, but 3.6 and 3.7 do not; some for one compute capability alone. Those of
experts stand for all variants, see `allowed_spill`."""
LOOP_BYTES = 144
"""What ends a tile of a mixture's d_pre spills: it is faster than smaller tiles, which spill nothing (NOTES.md)."""
CODE_BYTES = 120 * 1024
"""Of instructions of a kernel by hand. With 187 KB a mixture's d_pre took 1.8 times as long as with 68 (NOTES.md)."""
SHARED_BYTES = {(8, 0): 163 * 1024, (8, 9): 99 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024}
"""Of shared memory that one program may have, by compute capability; Triton compiles what asks for more."""


@dataclasses.dataclass(frozen=True)
class Resources:
    """Resources of one compiled kernel. `stack_bytes` is per thread and above zero when registers were spilled.

    With a call, as an assertion is one, ptxas lets each wgmma wait for the one before.
    """

    kernel: str
    capability: str
    dtype: str
    tokens: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    wgmma: int
    tcgen05: int
    mma: int
    tma: int
    calls: int


def launches(
    tokens: int, hidden: int, intermediate: int, dtype: torch.dtype, capability: Capability
) -> dict[str, Callable[[], Launch]]:
    """Name the launches of swiglu_glu, swiglu_mlp and their gradients at one shape; each is described when called."""
    shapes, make = dense_shapes(tokens, hidden, intermediate), meta(dtype)
    plain = LayerTensors(shapes, lambda name, shape: None if name.startswith("bias") else make(name, shape))
    interleaved = LayerTensors(shapes, make, formula=CLAMPED)
    for name in ("w_gate", "w_up", "d_w_gate", "d_w_up"):
        setattr(interleaved, name, torch.empty(2 * intermediate, hidden, dtype=dtype, device="meta")[::2])

    def described(operands: LayerTensors, kernel: str) -> Launch:
        with describing_for(capability):
            return operands.launch(kernel)

    names = {"forward": "forward", **TITLES, "forward-preact": "forward, gate and up stored"}
    found: dict[str, Callable[[], Launch]] = {name: partial(described, plain, kernel) for kernel, name in names.items()}
    found["forward, biases and clamp, interleaved"] = partial(described, interleaved, "forward-preact")
    found["dW read, interleaved"] = partial(described, interleaved, "weight-grad")
    last = described(plain, "forward-preact").then
    return found if last is None else {**found, "forward, parts added up": lambda: last}


def compile_launch(launch: Launch, capability: Capability) -> Any:
    """Compile the kernel of a launch for a compute capability, specialised to its arguments as a real launch is."""
    if not TRITON_AVAILABLE or INTERPRETING:
        raise RuntimeError("kernels are compiled only where Triton is installed and TRITON_INTERPRET is not set")
    return compiling.compile_launch(launch, capability)


def _read(tool: str, option: str, cubin: bytes) -> str:
    """Return what a tool that comes with Triton prints of a cubin."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [getattr(knobs.nvidia, tool).path, option, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def code_bytes(lines: list[str]) -> int:
    """Return how long a kernel's instructions are, 16 bytes for each line of assembly with an address."""
    return 16 * sum(re.match(r"\s*/\*[0-9a-f]{4,}\*/\s", line) is not None for line in lines)


def moved(lines: list[str]) -> tuple[int, int]:
    """Count wgmmas in assembly, and what makes a register uniform between two of a loop; the second waits for it."""
    places = [number for number, line in enumerate(lines) if "GMMA" in line]
    pairs = [(first, last) for first, last in itertools.pairwise(places) if last - first < NEIGHBOURS]
    return len(places), sum("R2UR" in line for first, last in pairs for line in lines[first:last])


def allocated_bytes(ttgir: str) -> int:
    """Return how much shared memory a kernel in Gluon allocates.

    Less than that in all means that a buffer has the place of another, whose last use Triton takes to be over: it does
    not see a use by address. So barriers and the arguments of warps once lay in a ring that rows were copied into.
    """
    sizes = re.findall(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<([0-9x]+)x[a-z]+(\d+)", ttgir)
    return sum(math.prod(map(int, shape.split("x"))) * int(bits) // 8 for shape, bits in sizes)


def one_by_one(lines: list[str]) -> bool:
    """Tell whether every wgmma in assembly ends a group, which is waited for before the next begins.

    So ptxas serialises all of a kernel that it finds wanting: a call, too few registers, wgmmas on their way where two
    branches meet (its messages C7510 to C7514).
    """
    wgmmas = [line for line in lines if "GMMA." in line]
    return len(wgmmas) > 1 and all("gsb0" in line for line in wgmmas)


def report(
    name: str, tokens: int, hidden: int, intermediate: int, dtype: torch.dtype, capability: Capability
) -> Resources:
    """Compile one kernel by its name in `launches` and count what it uses."""
    return _report(name, launches(tokens, hidden, intermediate, dtype, capability)[name](), tokens, dtype, capability)


def _report(name: str, launch: Launch, tokens: int, dtype: torch.dtype, capability: Capability) -> Resources:
    from triton.experimental.gluon._runtime import GluonJITFunction

    compiled = compile_launch(launch, capability)
    usage = _read("cuobjdump", "--dump-resource-usage", compiled.asm["cubin"])
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump: expected REG and STACK in its output, got {usage!r}")
    shared_bytes, most = compiled.metadata.shared, SHARED_BYTES.get(capability)
    if most is not None and shared_bytes > most:
        raise RuntimeError(f"it takes {shared_bytes} bytes of shared memory, where a program may have {most}")
    ptx = compiled.asm["ptx"]
    if launch.arguments.get("EARLY") and not _waits_first(ptx, launch.kernel.__name__ in READ_AHEAD):
        raise RuntimeError("it touches memory before it waits for the launch ahead, see runtime/early.py")
    if isinstance(launch.kernel, GluonJITFunction) and capability == (9, 0):
        lines = _read("nvdisasm", "--print-code", compiled.asm["cubin"]).splitlines()
        if (size := code_bytes(lines)) > CODE_BYTES:
            raise RuntimeError(f"it has {size} bytes of instructions, where {CODE_BYTES} stay in their cache")
        if (needed := allocated_bytes(compiled.asm["ttgir"])) > shared_bytes:
            taken = f"they take {needed} bytes of shared memory, and it has {shared_bytes}"
            raise RuntimeError(f"its buffers overlap: {taken}")
        if one_by_one(lines):
            raise RuntimeError("ptxas has serialised its wgmmas, ptxas --verbose says why")
        wgmmas, times = moved(lines)
        if times > wgmmas:
            raise RuntimeError(f"between {wgmmas} wgmmas {times} registers are made uniform, see loop._first_scales")
    counts = {
        "wgmma": ptx.count("wgmma.mma_async"), "tcgen05": ptx.count("tcgen05.mma"),
        "mma": len(re.findall(r"\bmma\.sync", ptx)), "tma": ptx.count("cp.async.bulk.tensor"),
        "calls": len(re.findall(r"\bcall\b", ptx.split(".section")[0])),
    }  # fmt: skip
    where = f"{capability[0]}.{capability[1]}", str(dtype).removeprefix("torch."), tokens
    return Resources(name, *where, int(found[1]), int(found[2]), shared_bytes, **counts)


def _waits_first(ptx: str, may_read: bool = False) -> bool:
    """Tell whether the first that touches the GPU's memory, or writes to it, is the wait for the launch ahead."""
    touches = "st|atom|red|cp" if may_read else "ld|st|atom|red|cp"
    first = re.search(rf"griddepcontrol\.wait|\b(?:{touches})\.(?!param|shared)", ptx)
    return first is not None and first[0].startswith("griddepcontrol")


def allowed_spill(kernel: str, capability: str) -> int:
    """How many bytes of a thread's registers a kernel may spill under this Triton."""
    if re.fullmatch("experts by hand, .*backward", kernel):
        return LOOP_BYTES
    later = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)
    kernel = re.sub(", (gate and up|interleaved|transposed|a part)", "", kernel)
    return SPILLS.get(f"{kernel}, for {capability}", SPILLS.get(kernel, FEW_BYTES)) if later else FEW_BYTES


@functools.cache
def _covering(capability: Capability, few: bool) -> list[tuple[str, Launch]]:
    return most_demanding(covering(capability)) if few else covering(capability)


def _report_of(capability: Capability, few: bool, number: int) -> Resources:
    name, launch = _covering(capability, few)[number]
    tensors = (getattr(value, "base", value) for value in launch.arguments.values())
    dtype = next(tensor.dtype for tensor in tensors if isinstance(tensor, torch.Tensor))
    try:
        return _report(name, launch, launch.arguments.get("M", 0), dtype, capability)
    except Exception as error:
        raise RuntimeError(f"{name!r} for {capability} under Triton {triton.__version__}: {error}") from error


def every(capabilities: list[Capability], parts: list[str], few: bool = False) -> Iterator[Resources]:
    """Compile what covers every kernel and tile for compute capabilities, as many at a time as there are cores.

    `parts` restricts it to kernels whose names hold one of them, `few` to the `most_demanding` tiles.
    """
    numbers = [
        (capability, few, number)
        for capability in capabilities
        for number, (name, _) in enumerate(_covering(capability, few))
        if not parts or any(part in name for part in parts)
    ]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("fork")) as pool:
        yield from pool.map(_report_of, *zip(*numbers, strict=True))


def main(arguments: list[str] | None = None) -> None:
    """Print a line per kernel, or JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m swiglu_kernels.standalone.compiled", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--capability", action="append", help="compute capability, repeatable (default 8.0 9.0 10.0)")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--tokens", type=int, action="append", help="repeatable (default 8192)")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=11008)
    parser.add_argument("--kernel", action="append", help="name, with --every and --few a part of it; repeatable")
    several = parser.add_mutually_exclusive_group()
    several.add_argument("--every", action="store_true", help="every kernel and tile, instead of those of one shape")
    several.add_argument("--few", action="store_true", help="every kernel in the tiles that spill first")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")
    options = parser.parse_args(arguments)
    texts = (text.split(".") for text in options.capability or ["8.0", "9.0", "10.0"])
    capabilities = [(int(major), int(minor)) for major, minor in texts]
    covered, reports = options.every or options.few, []
    found = every(capabilities, options.kernel or [], options.few) if covered else _of_one_shape(options, capabilities)
    for kernel in found:
        reports.append(kernel)
        if covered and not options.json:
            units = next((unit for unit in ("wgmma", "tcgen05", "mma") if getattr(kernel, unit)), "no matrix unit")
            print(
                f"{kernel.capability:>4}  {kernel.registers:3} registers  {kernel.stack_bytes:3} B spilled  "
                f"{kernel.shared_bytes:6} B shared  {units:14}  {kernel.kernel}"
            )
        elif not options.json:
            print("  ".join(f"{key} {value}" for key, value in vars(kernel).items()))
    if options.json:
        print(json.dumps(list(map(vars, reports))))
    elif covered:
        spilling = sum(kernel.stack_bytes > FEW_BYTES for kernel in reports)
        compiler = f"Triton {triton.__version__}"
        print(f"{compiler}: {len(reports)} kernels compiled, {spilling} spill more than {FEW_BYTES} bytes")
    excessive = [each.kernel for each in reports if each.stack_bytes > allowed_spill(each.kernel, each.capability)]
    if covered and excessive:
        sys.exit(f"Error: these spill more registers than they may: {'; '.join(excessive)}")


def _of_one_shape(options: argparse.Namespace, capabilities: list[Capability]) -> Iterator[Resources]:
    for capability, tokens in itertools.product(capabilities, options.tokens or [8192]):
        what = (tokens, options.hidden, options.intermediate, getattr(torch, options.dtype), capability)
        for name in options.kernel or launches(*what):
            yield report(name, *what)


if __name__ == "__main__":
    main()
