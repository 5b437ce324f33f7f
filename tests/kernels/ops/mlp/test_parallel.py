"""An MLP split over ranks, with what they send beside the products: output and gradients are those of one process.

On CPUs with gloo, in Triton's interpreter, by collectives and in pieces through memory that processes share; on GPUs
by both. Run as a script, this file is one of the processes: `python test_parallel.py RANK WORLD FOLDER DEVICE`.
"""

import dataclasses
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from quick_interpreter import quicken
from rank_processes import launched, replayed
from shared_files import files

IMPORTED = "swiglu_kernels.nn.parallel", "torch.distributed.tensor.parallel"
PATIENCE_S = 120
SIZES = {"cpu": (8, 16, 6), "cuda": (1024, 2048, 1024)}
"""Hidden and intermediate size, and tokens of a rank."""
NAMES = "x", "w_gate", "w_up", "w_down", "bias_gate", "bias_up"

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="PyTorch without torch.distributed")


@dataclasses.dataclass(frozen=True)
class Case:
    """How a call is made."""

    way: str
    by_rows: bool = True
    piece_rows: int = 1
    frozen: tuple[str, ...] = ()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


CASES = {
    "pieces": Case("pieces"),
    "one piece": Case("pieces", piece_rows=1 << 20),
    "pieces, gate and up again": Case("pieces", options={"save": "input", "activation": "gelu_tanh"}),
    "pieces, frozen weights": Case("pieces", frozen=NAMES[1:]),
    "pieces, x wants none": Case("pieces", frozen=("x", "bias_gate", "bias_up")),
    "beside, by rows": Case("beside"),
    "beside": Case("beside", by_rows=False),
    "beside, frozen weights": Case("beside", False, frozen=NAMES[1:4]),
}


def drawn(world: int, device: str, wide: bool = False) -> dict[str, torch.Tensor]:
    """All ranks' rows and weights, and the gradient of the result."""
    hidden, intermediate, tokens = SIZES[device]
    source = torch.Generator().manual_seed(world)
    shapes = {
        "x": (tokens * world, hidden), "w_gate": (intermediate, hidden), "w_up": (intermediate, hidden),
        "w_down": (hidden, intermediate), "bias_gate": (intermediate,), "bias_up": (intermediate,),
        "d_out": (tokens * world, hidden),
    }  # fmt: skip
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    made = {
        name: torch.randn(shape, generator=source) * (1 if name in ("x", "d_out") else shape[-1] ** -0.5)
        for name, shape in shapes.items()
    }
    return {name: value.to(dtype).to(device, torch.float64 if wide else dtype) for name, value in made.items()}


def alone(world: int, device: str, activation: str) -> dict[str, torch.Tensor]:
    """The truth, in fp64."""
    from swiglu_kernels import reference

    given = drawn(world, device, wide=True)
    leaves = {name: given[name].requires_grad_() for name in NAMES}
    z = reference.swiglu_glu(*(leaves[name] for name in NAMES if name != "w_down"), activation=activation)
    out = z @ leaves["w_down"].t()
    out.backward(given["d_out"])
    return {"out": out.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


def part_of(given: dict[str, torch.Tensor], rank: int, world: int, case: Case) -> dict[str, torch.Tensor]:
    """What a rank has."""

    def cut(name: str, value: torch.Tensor) -> torch.Tensor:
        if name in ("x", "d_out"):
            return value.chunk(world)[rank] if case.by_rows else value
        return value.chunk(world, 1 if name == "w_down" else 0)[rank]

    part = {name: cut(name, value).clone() for name, value in given.items()}
    return {name: value.requires_grad_(name in NAMES and name not in case.frozen) for name, value in part.items()}


def called(part: dict[str, torch.Tensor], case: Case) -> torch.Tensor:
    from swiglu_kernels.ops.mlp import parallel

    parallel.PIECE_ROWS = case.piece_rows
    ranks = parallel.Ranks(dist.group.WORLD, case.by_rows, case.way)
    x = part["x"].unflatten(0, (2, -1))  # as modules have it
    others = (part[name] for name in NAMES[1:])
    return parallel.swiglu_mlp_parallel(x, *others, ranks=ranks, **case.options).flatten(0, 1)


def stepped(part: dict[str, torch.Tensor], case: Case) -> dict[str, torch.Tensor | None]:
    """Output and gradients of this rank, the latter of a retained graph and then of one that is freed."""
    out = called(part, case)
    for retain in (True, False):
        for name in NAMES:
            part[name].grad = None
        out.backward(part["d_out"], retain_graph=retain)
    return {"out": out.detach()} | {name: part[name].grad for name in NAMES}


def chained(part: dict[str, torch.Tensor], case: Case, layers: int = 3) -> torch.Tensor:
    """The gradient of x behind several layers that share memory, which a first pass has left as it is."""
    for _ in range(2):
        x = part["x"].detach().requires_grad_()
        out = x
        for _ in range(layers):
            out = out + called(part | {"x": out}, case)
        out.backward(part["d_out"])
    assert x.grad is not None
    return x.grad


def what_is_chosen_and_refused(rank: int) -> None:
    """By `way_of`, a module's split and the call itself, on two ranks of a CPU."""
    from torch.distributed._functional_collectives import all_reduce
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import parallelize_module

    from swiglu_kernels import FusedSwiGLU, FusedSwiGLUMLP
    from swiglu_kernels.nn.parallel import SwiGLUParallel
    from swiglu_kernels.ops.mlp import parallel

    mesh, x = init_device_mesh("cpu", (2,)), torch.ones(1, 2, 8)
    few, many = x.expand(4, 2, 8), x.expand(4096, 2, 8)

    def module(overlap: bool | None = None, by_rows: bool = True, **options: Any) -> FusedSwiGLUMLP:
        style = SwiGLUParallel(sequence_parallel=by_rows, overlap=overlap)
        return parallelize_module(FusedSwiGLUMLP(8, 16, **options), mesh, style)

    split: Any = module().tensor_parallel
    whole = distribute_tensor(torch.ones(2, 4, 8), mesh, [Replicate()])
    sharded, uneven = (distribute_tensor(whole.to_local()[:, :length], mesh, [Shard(1)]) for length in (4, 3))
    for (way, why), got in {
        ("pieces", "ranks read each other's memory"): split.way(many),
        (None, "16 tokens are fewer than 16384"): split.way(few),
        (None, "16 tokens are fewer than 4096"): torch.no_grad()(split.way)(few),
        (None, "asked for"): module(False).tensor_parallel.way(many),  # type: ignore[union-attr]
        ("beside", "every rank has all rows"): module(True, False).tensor_parallel.way(x),  # type: ignore[union-attr]
        (None, "x is a DTensor that is placed as"): split.way(whole),
        (None, "x does not divide by the ranks"): split.way(uneven),
        (None, "fewer than"): split.way(sharded),
        (None, "there is a single rank, no token, or no kernel"): split.way(many.double()),
        (None, "fp8"): module(precision="fp8-rowwise").overlap(many),
        (None, "accumulate_into_main_grad"): module(accumulate_into_main_grad=True).overlap(many),
        (None, "not split"): FusedSwiGLUMLP(8, 16).overlap(many),
        (None, "there is no down_proj"): parallelize_module(FusedSwiGLU(8, 16), mesh, SwiGLUParallel()).overlap(many),
        (None, "x is a AsyncCollectiveTensor"): split.way(all_reduce(many.contiguous(), "sum", mesh)),
    }.items():
        assert got[0] == way, got
        assert why in got[1]
    assert "overlap=True" in repr(module(True))
    main = module(True, accumulate_into_main_grad=True)
    forced, hooked = module(True), module(True)
    hooked.down_proj.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(forced(distribute_tensor(x, mesh, [Shard(1)])), forced(x.chunk(2, 1)[rank]))
    given = part_of(drawn(2, "cpu"), rank, 2, CASES["pieces"])
    fewer = given | {"x": given["x"][: 4 - 2 * rank]}
    sentences: dict[str, Callable[[], Any]] = {
        "overlap: expected None or False, got True: accumulate_into_main_grad": lambda: main(x),
        "down_proj: expected a plain torch.nn.Linear": lambda: hooked(x),
        "the ranks call with different (tokens, hidden, dtype): [(2, 8,": lambda: called(fewer, CASES["pieces"]),
        "w_up: expected shape": lambda: called(given | {"w_up": given["w_up"][:1]}, CASES["pieces"]),
    }
    for sentence, call in sentences.items():
        with pytest.raises((TypeError, ValueError), match=re.escape(sentence)):
            call()
    for name in (parallel.PIECES, parallel.BESIDE):
        d_x = []
        for gradient in (all_reduce(given["d_out"], "sum", mesh), all_reduce(given["d_out"], "sum", mesh) + 0):
            d_x += torch.autograd.grad(called(given, Case(name)), given["x"], gradient)  # under way, and there
        assert torch.equal(*d_x)
        out = called(given, Case(name))
        with pytest.raises(RuntimeError, match="expected create_graph=False"):
            torch.autograd.grad(out.sum(), given["x"], create_graph=True)


def main(rank: int, world: int, folder: Path, device: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        quicken()
        from swiglu_kernels.ops.mlp import parallel

        parallel.internals.symmetric_memory = partial(files, folder)
        parallel.why_not_symmetric = lambda x, group: None
    where, patience = f"file://{folder / 'rendezvous'}", timedelta(seconds=PATIENCE_S / 2)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=world, timeout=patience)
    given = drawn(world, device)
    found: dict[str, Any] = {name: stepped(part_of(given, rank, world, case), case) for name, case in CASES.items()}
    pieces = CASES["pieces"]
    found["again"] = stepped(part_of(given, rank, world, pieces), pieces)
    found["chains"] = [chained(part_of(given, rank, world, case), case) for case in (pieces, CASES["beside, by rows"])]
    if device == "cuda":
        found["graph"] = replayed(part_of(given, rank, world, pieces), NAMES, partial(called, case=pieces))
    elif world == 2:
        what_is_chosen_and_refused(rank)
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


GPUS = torch.cuda.device_count()
TWO_GPUS = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs; there are {GPUS}")]


@pytest.fixture(
    scope="module", params=[("cpu", 2), ("cpu", 4), pytest.param(("cuda", 2), marks=TWO_GPUS)],
    ids=lambda param: f"{param[0]}-{param[1]}",
)  # fmt: skip
def place(request: pytest.FixtureRequest) -> tuple[str, int]:
    return request.param


@pytest.fixture(scope="module")
def results(place: tuple[str, int], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the processes found, by rank."""
    (device, world), folder = place, tmp_path_factory.mktemp("processes")
    more = {"OMP_NUM_THREADS": "1"} | ({"TRITON_INTERPRET": "1"} if device == "cpu" else {})
    for status, output in launched(__file__, world, (world, folder, device), device, PATIENCE_S, more, IMPORTED):
        assert status == 0, output
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_those_of_one_process(place, results, name) -> None:
    device, world = place
    case, tolerance = CASES[name], 2e-2 if device == "cuda" else 1e-5
    for kind, right in alone(world, device, case.options.get("activation", "silu")).items():
        got = [result[name][kind] for result in results]
        if kind in case.frozen:
            assert got == [None] * world
            continue
        if kind in ("out", "x") and not case.by_rows:
            assert all(torch.equal(each, got[0].to(each.device)) for each in got), "all ranks have all rows"
            joined = got[0]
        else:
            joined = torch.cat([each.to(right.device) for each in got], 1 if kind == "w_down" else 0)
        assert (joined.to(right.device).double() - right).norm() <= tolerance * right.norm(), kind


def test_pieces_have_the_same_bits_again_and_in_a_graph(place, results) -> None:
    for result in results:
        for name, value in result["pieces"].items():
            assert torch.equal(value, result["again"][name]), name
            if "graph" in result:
                assert torch.equal(value, result["graph"][name]), name
    assert ("graph" in results[0]) == (place[0] == "cuda")


def test_layers_share_memory(place, results) -> None:
    tolerance = 2e-2 if place[0] == "cuda" else 1e-5
    for pieces, beside in (result["chains"] for result in results):
        assert pieces.isfinite().all()
        assert (pieces - beside).norm() <= tolerance * beside.norm()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
