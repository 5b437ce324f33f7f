import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from swiglu_kernels.runtime import backend
from swiglu_kernels.standalone import covering
from swiglu_kernels.standalone.compiled import compile_launch, launches, moved, one_by_one
from swiglu_kernels.tiles import rules

pytestmark = pytest.mark.skipif(not backend.TRITON_AVAILABLE, reason="Triton is not installed")

UNITS = {"8.0": "mma", "8.9": "mma", "9.0": "wgmma", "10.0": "tcgen05"}


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python without Triton's interpreter, whose kernels cannot be compiled, nor line numbers, which take time."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_DISABLE_LINE_INFO"] = "1"
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)


def compile_kernels(*arguments: str) -> list[dict[str, Any]]:
    done = python("-m", "swiglu_kernels.standalone.compiled", "--json", *arguments)
    assert done.returncode == 0, done.stderr  # also if a kernel spills
    return json.loads(done.stdout)


def missing_tool(capability: str) -> str | None:
    name = "ptxas_blackwell" if capability == "10.0" else "ptxas"
    try:
        path = getattr(backend.triton.knobs.nvidia, name).path
    except (AttributeError, RuntimeError) as error:
        return f"this Triton has no {name}: {error}"
    return None if os.path.exists(path) else f"this Triton has no {name} at {path}"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("capability", UNITS)
def test_every_kernel_compiles_without_spills(capability: str) -> None:
    """In the tiles that need most registers; `make test-versions` compiles every tile, by several Tritons."""
    if reason := missing_tool(capability):
        pytest.skip(reason)
    only = ("--kernel", "fp8") if capability == "8.9" else ()  # the others are compiled for 8.0
    reports = compile_kernels("--few", "--capability", capability, *only)
    names = " ".join(report["kernel"] for report in reports)
    for kernel in ("forward", "recompute", "dX", "dW", "mlp", "silu_mul", "unsloth") if not only else ():
        assert kernel in names
    assert ("fp8 rowwise" in names) == ("fp8 blockwise" in names) == (capability != "8.0")
    for kernel in ("row forward", "ping-pong forward", "gate backward", "experts by hand", "fp8 forward by hand"):
        assert (kernel in names) == (capability == "9.0")
    for report in reports:
        assert report["calls"] == 0, report
        if re.search(r"8192 tokens, bfloat16|\d columns|glu, 8192|dX, 8192", report["kernel"]):
            assert report[UNITS[capability]] > 0, report


SPOILT = {
    "bytes of shared memory, where a program may have 1000": "compiled.SHARED_BYTES[9, 0] = 1000",
    r"it has \d{4,5} bytes of instructions, where 64 stay": "compiled.CODE_BYTES = 64",
    r"between \d+ wgmmas \d+ registers are made uniform": (
        "from swiglu_kernels.hopper import loop; stage = loop._full_stage.fn;"
        "of_thread = 'mov.u32 at, %tid.x; and.b32 at, at, 1; add.u32 low_a, low_a, at;';"
        "loop._full_stage.fn = lambda *given: [*stage(*given), of_thread]"
    ),
    "its buffers overlap: they take": (
        "from triton.experimental.gluon.language import _core;"
        "_core.shared_memory_descriptor._keep_alive = _core.builtin(lambda self, _semantic=None: None)"
    ),
}


SPOIL = """
import os, sys
from swiglu_kernels.standalone import compiled
children = {}
for number, (message, change) in enumerate(%r.items()):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(write, 2)
        os.environ["TRITON_CACHE_DIR"] = os.path.join(%r, str(number))  # what is spoilt is for nobody else
        kernel = "dW transposed, rows copied" if "overlap" in message else "row forward, 16 tokens, 8 columns"
        exec(change)
        compiled.main(["--every", "--capability", "9.0", "--kernel", kernel])
        os._exit(0)
    os.close(write)
    children[message] = child, read
found = {message: (open(read).read(), os.waitpid(child, 0)[1]) for message, (child, read) in children.items()}
print(json.dumps(found))
"""


@pytest.mark.skipif(missing_tool("9.0") is not None, reason="this Triton has no ptxas")
def test_kernels_that_are_wanting_are_errors(tmp_path: Path) -> None:
    """Each in a fork of one process: the imports take longer than compiling."""
    done = python("-c", f"import json{SPOIL % (SPOILT, str(tmp_path))}")
    assert done.returncode == 0, done.stderr
    for message, (said, status) in json.loads(done.stdout.splitlines()[-1]).items():
        assert status != 0, message
        assert re.search(message, said), said


SIXTEEN_BYTES = """
import json
from swiglu_kernels.standalone import covering
from swiglu_kernels.standalone.compiled import compile_launch
found = {}
for name, launch in covering._experts((9, 0)):
    if "odd multiples of 8" in name:
        ptx = compile_launch(launch, (9, 0)).asm["ptx"]
        found[name] = [ptx.count(of) for of in ("cp.async.cg.", "st.global.v4", "st.global.b16")]
print(json.dumps(found))
"""


@pytest.mark.skipif(missing_tool("9.0") is not None, reason="this Triton has no ptxas")
def test_rows_of_experts_of_odd_multiples_of_8_are_moved_16_bytes_at_a_time() -> None:
    """Triton by itself knows of multiples of 16 alone."""
    done = python("-c", SIXTEEN_BYTES)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 6
    for name, (reads, writes, single) in found.items():
        assert reads, name
        assert writes, name
        assert not single, name


def test_what_makes_wgmmas_wait_is_counted() -> None:
    """Registers made uniform between two, and wgmmas that all wait for the one before, which no other check tells."""
    wgmma, move = "QGMMA.64x192x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24 ;", "R2UR UR5, R163 ;"
    assert moved([move, wgmma, move, move, "LDS R1, [R2] ;", wgmma, move]) == (2, 2)
    assert moved([wgmma, *["FADD R1, R2, R1 ;"] * 100, move, wgmma]) == (2, 0)  # of two loops
    assert moved([]) == (0, 0)
    begun = "HGMMA.64x192x16.F32.BF16 R24, gdesc[UR4], R24 ;"
    last = begun.replace(" ;", ", gsb0 ;")
    assert one_by_one([last, "WARPGROUP.DEPBAR.LE gsb0, 0x0 ;", last])
    assert not one_by_one([begun, begun, last, "WARPGROUP.DEPBAR.LE gsb0, 0x1 ;"])
    assert not one_by_one(["FADD R1, R2, R1 ;"])


TOKENS, DTYPES = (1, 16, 17, 64, 65, 128, 129, 512, 513, 8192), (torch.bfloat16, torch.float32)
HIDDEN, INTERMEDIATE = (1024, 2048, 3584, 4096, 7168, 8192), (768, 2048, 2880, 5632, 11008, 14336, 18944, 28672)
SIZES = list(itertools.product(HIDDEN, INTERMEDIATE))


def test_every_tile_that_is_shipped_is_among_them() -> None:
    capability, covered = (9, 0), set()
    for _, launch in covering.covering(capability):
        sizes = [launch.arguments.get(f"BLOCK_{axis}") for axis in "MNKH"]
        covered |= {(*sorted(size for size in sizes if size), launch.num_warps, launch.num_stages)}
    shipped = [
        rules.forward_tile(tokens, hidden, intermediate, dtype, capability, aligned, 132)
        for tokens, (hidden, intermediate), dtype, aligned in itertools.product(TOKENS, SIZES, DTYPES, (True, False))
    ]
    tables = *(table["hopper"] for table in rules.TABLES.values()), rules._FLOAT32, rules._UNALIGNED
    shipped += [tile for table in tables for _, tile in table]
    for tile in shipped:
        assert (*sorted((tile.rows, tile.columns, tile.depth)), tile.warps, tile.stages) in covered, tile


def test_the_tile_that_spills_first_stands_for_its_kernel() -> None:
    every = covering.covering((9, 0))
    few = covering.most_demanding(every)
    assert {str(launch.kernel) for _, launch in few} == {str(launch.kernel) for _, launch in every}
    names = [name for name, _ in few]
    assert "forward, 8192 tokens, bfloat16" in names
    assert "forward, 16 tokens, bfloat16" not in names


def test_nothing_is_compiled_under_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    from swiglu_kernels.standalone import compiled

    monkeypatch.setattr(compiled, "INTERPRETING", True)
    launch = launches(8, 16, 16, torch.bfloat16, (9, 0))["forward"]()
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is not set"):
        compile_launch(launch, (9, 0))


EVEN_AND_ODD = """
import torch
from swiglu_kernels.ops.glu import hopper_forward, hopper_row, hopper_transposed
from swiglu_kernels.ops.experts.routing import new_routing, route_launch

def empty(*size, dtype=torch.bfloat16):
    return torch.empty(size, dtype=dtype, device="meta")

def compiled_for(launch):
    while launch is not None:
        values = {p.name: launch.arguments[p.name] for p in launch.kernel.params if not p.do_not_specialize}
        whole = {name: value % 16 for name, value in values.items() if type(value) is int and value > 1}
        yield launch.kernel.fn.__name__, whole
        launch = launch.then

def launches(tokens):
    x, w, z = empty(tokens, 4096), empty(11008, 4096), empty(tokens, 11008)
    wide = hopper_forward, hopper_forward.tile_for(tokens, 11008, 132, False)
    choices = wide, (hopper_row, hopper_row.tile_for(11008, 132))
    shared = hopper_transposed.tile_for(160, 4096, 11008, 132, False)
    for module, tile in (*choices, (hopper_transposed, shared)):
        yield module.forward_launch(x, w, w, z, None, tile)

for even in (128, 160, 8192):
    odd = [list(compiled_for(one)) for one in launches(even - 1)]
    assert odd == [list(compiled_for(one)) for one in launches(even)], (even, odd)

def routings(tokens):
    index = empty(tokens, 8, dtype=torch.int64)
    return route_launch(index, *new_routing(index, 128, 128)[:5], 128)

assert list(compiled_for(routings(8192))) == list(compiled_for(routings(8191)))
"""


def test_what_is_made_by_hand_is_compiled_once_for_even_and_odd_numbers_of_tokens() -> None:
    done = python("-c", EVEN_AND_ODD)
    assert done.returncode == 0, done.stderr
