"""Experts on several ranks: output and gradients are those of one process with all tokens and experts.

On CPUs with gloo, by all-to-all and by the kernels of `exchange.py` in Triton's interpreter on memory that processes
share, before the products and while they run; on two GPUs by all three. Run as a script, this file is one of the
processes: `python test_parallel.py RANK WORLD FOLDER DEVICE`, with `tests/support` on PYTHONPATH.
"""

import dataclasses
import itertools
import os
import re
import sys
import time
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

IMPORTED = "torch._dynamo", "torch.distributed.fsdp", "swiglu_kernels.nn.parallel"
OF_TWO = *IMPORTED, "functorch.compile", "transformers.models.qwen3_moe.modeling_qwen3_moe"
PATIENCE_S = 120
HIDDEN, INTERMEDIATE, EXPERTS, SLOTS = 24, 16, 8, 3
SIZES = {"cpu": (24, 16, 8, 3), "cuda": (512, 256, 16, 4)}

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="PyTorch without torch.distributed")


def counts_of(case: str, world: int) -> list[int]:
    """Tokens of each rank."""
    return {
        "one token": [0] * (world - 1) + [1], "a rank without rows": [5, 0, 7, 2][:world],
        "different numbers": [4, 7, 1, 6][:world], "many": [72] * world,
    }.get(case, [6] * world)  # fmt: skip


CASES = ("random", "all to one rank", "one token", "a rank without rows", "different numbers", "ids of no rank", "many")


@dataclasses.dataclass
class Layer:
    """All ranks' tokens and experts, drawn alike everywhere."""

    x: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor
    w_gate_up: torch.Tensor
    w_down: torch.Tensor
    biases: dict[str, torch.Tensor]
    d_out: torch.Tensor


def drawn(case: str, world: int, device: str) -> Layer:
    hidden, intermediate, experts, slots = SIZES[device]
    source = torch.Generator().manual_seed(CASES.index(case))
    tokens = sum(counts_of(case, world)) * (40 if device == "cuda" else 1)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=source) * scale

    index = torch.rand(tokens, experts, generator=source).argsort(1)[:, :slots]
    x, weights = normal(tokens, hidden), torch.rand(tokens, slots, generator=source)
    if case == "all to one rank":
        index %= experts // world
    if case == "ids of no rank":
        index[::2] = torch.tensor([-1, experts, 2**40, -7])[:slots]
        index[1::2, 0] = -1
        x[::2] = weights[::2] = weights[1::2, 0] = float("nan")
    layer = Layer(
        x, index, weights, normal(experts, 2 * intermediate, hidden, scale=hidden**-0.5),
        normal(experts, hidden, intermediate, scale=intermediate**-0.5),
        {"b_gate_up": normal(experts, 2 * intermediate), "b_down": normal(experts, hidden)}, normal(tokens, hidden),
    )  # fmt: skip
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    for name, value in vars(layer).items():
        if name == "biases":
            layer.biases = {key: bias.to(device, dtype) for key, bias in value.items()}
        else:
            setattr(layer, name, value.to(device, value.dtype if name in ("index", "weights") else dtype))
    return layer


def alone(layer: Layer) -> dict[str, torch.Tensor]:
    """The truth, in fp64."""
    from swiglu_kernels import reference

    names = ("x", "weights", "w_gate_up", "w_down")
    wide = {name: getattr(layer, name).double().requires_grad_() for name in names}
    biases = {name: value.double().requires_grad_() for name, value in layer.biases.items()}
    skipped = layer.index.clamp(-1, len(layer.w_down))
    clean = {name: torch.where(wide[name].isnan(), 0, wide[name]) for name in ("x", "weights")}
    out = reference.swiglu_experts(clean["x"], wide["w_gate_up"], wide["w_down"], skipped, clean["weights"], **biases)
    out.backward(layer.d_out.double())
    return {"out": out.detach()} | {name: value.grad for name, value in (wide | biases).items()}


def parts_of(layer: Layer, rank: int, world: int, case: str, device: str) -> dict[str, Any]:
    """What a rank has."""
    counts = [count * (40 if device == "cuda" else 1) for count in counts_of(case, world)]
    each = len(layer.w_down) // world
    mine = slice(sum(counts[:rank]), sum(counts[: rank + 1])), slice(rank * each, (rank + 1) * each)
    of_tokens = {name: getattr(layer, name)[mine[0]].clone() for name in ("x", "weights", "index", "d_out")}
    of_experts = {name: getattr(layer, name)[mine[1]].clone() for name in ("w_gate_up", "w_down")}
    return of_tokens | of_experts | {name: value[mine[1]].clone() for name, value in layer.biases.items()}


LEAVES = ("x", "weights", "w_gate_up", "w_down", "b_gate_up", "b_down")


def called(part: dict[str, Any], **options: Any) -> torch.Tensor:
    from swiglu_kernels import swiglu_experts_parallel

    return swiglu_experts_parallel(
        part["x"], part["w_gate_up"], part["w_down"], part["index"], part["weights"], b_gate_up=part["b_gate_up"],
        b_down=part["b_down"], **options,
    )  # fmt: skip


def stepped(part: dict[str, Any], **options: Any) -> dict[str, torch.Tensor]:
    """Output and gradients of this rank."""
    part = part | {name: part[name].requires_grad_() for name in LEAVES}
    out = called(part, **options)
    out.backward(part["d_out"])
    return {"out": out.detach()} | {name: part[name].grad for name in LEAVES}


TRANSPORTS = "all-to-all", "symmetric", "overlapped"


def transports(device: str, world: int) -> tuple[str, ...]:
    """Kernels are interpreted in two processes alone."""
    return ("all-to-all",) if (device, world) == ("cpu", 4) else TRANSPORTS


def results_of(rank: int, world: int, folder: Path, device: str) -> dict[Any, Any]:
    """What this rank finds in each case by each transport."""
    from swiglu_kernels.ops.experts import parallel
    from swiglu_kernels.runtime import internals

    if device == "cpu":
        internals.symmetric_memory = partial(files, folder)
        torch.cuda.is_current_stream_capturing = lambda: False
    found: dict[Any, Any] = {}
    for transport in transports(device, world):
        if device == "cpu":
            parallel.why_not_symmetric = lambda x, group, why=transport == parallel.ALL_TO_ALL: (
                "no GPU" if why else None
            )
        for case in CASES:
            part = parts_of(drawn(case, world, device), rank, world, case, device)
            most = max(counts_of(case, world)) * (40 if device == "cuda" else 1)
            parallel.overlap_pays = lambda *_, pays=transport == "overlapped": pays
            found[transport, case] = stepped(part, tokens_per_rank=most)
        if transport != parallel.ALL_TO_ALL and device == "cuda":
            part = parts_of(drawn("many", world, device), rank, world, "many", device)
            part |= {name: part[name].requires_grad_() for name in LEAVES}
            found[transport, "graph"] = replayed(part, LEAVES, called)
    part = parts_of(drawn("random", world, device), rank, world, "random", device)
    found["shared"] = stepped(part, shared=lambda x: 2 * x)
    return found


WAYS = ("plain", "recomputed", "compiled", "in fsdp", "of transformers")


def model_of(layer: Layer) -> Any:
    """A patched model of transformers with such experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from swiglu_kernels import patch_model

    count, hidden, intermediate = layer.w_down.shape
    config = Qwen3MoeConfig(
        num_experts=count, hidden_size=hidden, moe_intermediate_size=intermediate, num_hidden_layers=1, vocab_size=8,
        num_attention_heads=1, num_key_value_heads=1, head_dim=8, intermediate_size=8,
        num_experts_per_tok=layer.index.shape[1],
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    patch_model(model)
    return model


def module_of(way: str, layer: Layer) -> Any:
    """With all experts, and no weights gradient yet."""
    from swiglu_kernels import FusedSwiGLUExperts

    count, hidden, intermediate = layer.w_down.shape
    if way == "of transformers":
        module = model_of(layer).model.layers[0].mlp.experts
    else:
        module = FusedSwiGLUExperts(hidden, intermediate, count, bias=True)
    weights = {"gate_up_proj": layer.w_gate_up, "down_proj": layer.w_down}
    if way != "of transformers":
        weights |= {f"{name}_bias": layer.biases[key] for name, key in zip(weights, layer.biases, strict=True)}
    module.load_state_dict(weights)
    return module


def modules_of(rank: int, world: int) -> dict[str, dict[str, torch.Tensor]]:
    """The same of a module that is split by its style, wrapped in different ways."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    from swiglu_kernels.nn.parallel import SwiGLUExpertsParallel

    layer, found = drawn("random", world, "cpu"), {}
    part = parts_of(layer, rank, world, "random", "cpu")
    for way in ("in fsdp",) if world == 4 else WAYS:
        module, replicas = module_of(way, layer), 2 if way == "in fsdp" and world == 4 else 1
        keys = list(module.state_dict())
        mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("dp", "ep"))
        parallelize_module(module, mesh["ep"], SwiGLUExpertsParallel())
        assert list(module.state_dict()) == keys
        assert module.down_proj.to_local().shape[0] == len(layer.w_down) * replicas // world
        assert torch.equal(module.down_proj.full_tensor(), layer.w_down)
        called = {
            "recomputed": checkpoint_wrapper, "compiled": lambda module: torch.compile(module, backend="aot_eager"),
            "in fsdp": partial(fully_shard, mesh=mesh["dp"]),
        }.get(way, lambda module: module)(module)  # fmt: skip
        x, weights = (part[name].clone().requires_grad_() for name in ("x", "weights"))
        more = {} if way == "of transformers" else {"shared": torch.clone}
        out = called(x, part["index"], weights, **more)
        out.backward(part["d_out"])
        added = (x.detach(), part["d_out"]) if more else (0, 0)
        found[way] = {"out": out.detach() - added[0], "x": x.grad - added[1], "weights": weights.grad} | {
            name: parameter.grad.full_tensor() * replicas  # FSDP takes the mean
            for name, parameter in module.named_parameters()
        }
    return found


def refusals(rank: int) -> None:
    """What a call, the style and `explain_experts` say, on two ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    from swiglu_kernels import FusedSwiGLUExperts, explain_experts, unpatch
    from swiglu_kernels.nn.parallel import SwiGLUExpertsParallel
    from swiglu_kernels.ops.experts import parallel

    layer, mesh = drawn("random", 2, "cpu"), init_device_mesh("cpu", (2,))
    part = parts_of(layer, rank, 2, "random", "cpu")
    fewer = part | {name: part[name][: 3 - rank] for name in ("x", "weights", "index")}
    module = parallelize_module(module_of("plain", layer), mesh, SwiGLUExpertsParallel(transport="all-to-all"))
    assert module(part["x"], part["index"], part["weights"]).isfinite().all()
    sentences = {
        "tokens_per_rank: expected at least the 6 tokens of x, got 5": lambda: called(part, tokens_per_rank=5),
        "transport: expected one of 'symmetric', 'all-to-all', got 'pigeon'": lambda: called(part, transport="pigeon"),
        "the ranks call with different (experts, tokens, k, hidden, dtypes): [(4, 2, 3, 24": lambda: called(fewer),
        "expected experts that patch_model has set to its kernels, got Linear": lambda: parallelize_module(
            torch.nn.Linear(2, 2), mesh, SwiGLUExpertsParallel()
        ),
        "divisible by the 2 ranks, got 3": lambda: parallelize_module(
            FusedSwiGLUExperts(8, 8, 3), mesh, SwiGLUExpertsParallel()
        ),
        "it is split over ranks already, (2 ranks)": lambda: parallelize_module(module, mesh, SwiGLUExpertsParallel()),
    }
    for sentence, call in sentences.items():
        with pytest.raises((TypeError, ValueError), match=re.escape(sentence)):
            call()
    operands = part["x"], part["w_gate_up"], part["w_down"], part["index"], part["weights"]
    lines = explain_experts(*operands, group=mesh).splitlines()
    assert len(lines) == 3
    assert "through symmetric memory" in lines[0]
    parallel.why_not_symmetric = lambda x, group: "no GPU"
    assert "by all-to-all, for whose counts the host waits (no GPU)" in explain_experts(*operands, group=mesh)
    with pytest.raises(ValueError, match="expected 'all-to-all' or None, got 'symmetric': no GPU"):
        called(part, transport="symmetric")
    model = model_of(layer)
    parallelize_module(model.model.layers[0].mlp.experts, mesh, SwiGLUExpertsParallel())
    assert "split over ranks" in str(unpatch(model))


def main(rank: int, world: int, folder: Path, device: str, how: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    elif world == 2:
        quicken()
    where, patience = f"file://{folder / 'rendezvous'}", timedelta(seconds=PATIENCE_S / 2)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=world, timeout=patience)
    if how == "dies":
        part = parts_of(drawn("random", world, device), rank, world, "random", device)
        group = dist.new_group(timeout=timedelta(seconds=15))
        called(part, group=group)
        if rank == 1:
            os._exit(3)
        print(called(part, group=group).sum().item())
        os._exit(0)
    found = results_of(rank, world, folder, device)
    if device == "cpu":
        found["modules"] = modules_of(rank, world)
    if (device, world) == ("cpu", 2):
        refusals(rank)
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def needs_gpus(count: int) -> Any:
    there = torch.cuda.device_count()
    return [pytest.mark.gpu, pytest.mark.skipif(there < count, reason=f"needs {count} GPUs; there are {there}")]


@pytest.fixture(
    scope="module",
    params=[("cpu", 2), ("cpu", 4), pytest.param(("cuda", 2), marks=needs_gpus(2))],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def place(request: pytest.FixtureRequest) -> tuple[str, int]:
    return request.param


def ended(device: str, world: int, folder: Path, how: str) -> list[tuple[int, str]]:
    """Exit statuses and outputs of processes, by rank."""
    more = {"OMP_NUM_THREADS": "1"} | ({"TRITON_INTERPRET": str(int(world == 2))} if device == "cpu" else {})
    imported = () if how == "dies" else OF_TWO if world == 2 else IMPORTED
    return launched(__file__, world, (world, folder, device, how), device, PATIENCE_S, more, imported)


@pytest.fixture(scope="module")
def results(place: tuple[str, int], tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What the processes found, by rank."""
    folder = tmp_path_factory.mktemp("processes")
    for status, output in ended(*place, folder, "works"):
        assert status == 0, output
    return [torch.load(folder / f"{rank}.pt") for rank in range(place[1])]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_output_and_gradients_are_those_of_one_process(place, results, transport, case) -> None:
    device, world = place
    if transport not in transports(device, world):
        pytest.skip("kernels are interpreted in two processes alone")
    truth = alone(drawn(case, world, device))
    tolerance = 2e-2 if device == "cuda" else 1e-5
    for name, right in truth.items():
        got = torch.cat([result[transport, case][name].to(right.device) for result in results]).double()
        assert got.shape == right.shape
        assert got.isfinite().all(), name
        assert (got - right).norm() <= tolerance * max(right.norm(), 1e-3), name


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpus(2))])
def test_where_a_rank_dies_the_others_end_in_time_with_their_last_words(device: str, tmp_path: Path) -> None:
    begin = time.monotonic()
    (status, output), (died, _) = ended(device, 2, tmp_path, "dies")
    assert died == 3
    assert status not in (0, None)
    assert "Error" in output
    assert time.monotonic() - begin < PATIENCE_S / 2, "15 s, and what starting takes"


@pytest.mark.parametrize("transport", TRANSPORTS[1:])
def test_a_graph_computes_the_same_bits(place, results, transport) -> None:
    if place[0] == "cpu":
        pytest.skip("CPUs have no CUDA graphs")
    for result in results:
        for name, value in result[transport, "graph"].items():
            assert torch.equal(value, result[transport, "many"][name]), name


def test_what_runs_while_rows_travel_changes_no_bit(place, results) -> None:
    if "overlapped" not in transports(*place):
        pytest.skip("kernels are interpreted in two processes alone")
    for result, case in itertools.product(results, CASES):
        for name, value in result["symmetric", case].items():
            assert torch.equal(value, result["overlapped", case][name]), (case, name)


@pytest.mark.parametrize(
    ("ranks", "tokens", "experts", "pays"),
    [
        (2, 16384, (8, 2048, 768), True), (2, 256, (8, 2048, 768), False), (4, 8192, (8, 2048, 768), True),
        (8, 8192, (8, 2048, 768), False), (2, 8192, (2, 4096, 14336), True), (8, 8192, (2, 4096, 14336), False),
    ],
)  # fmt: skip
def test_products_run_while_rows_travel_where_many_do_and_most_are_wanted(ranks, tokens, experts, pays) -> None:
    from swiglu_kernels.ops.experts.exchange import RankSizes
    from swiglu_kernels.ops.experts.parallel import overlap_pays

    slots, *sizes = experts
    assert overlap_pays(RankSizes(ranks, 0, 8, tokens, slots), *sizes, torch.bfloat16) is pays


def test_what_a_shared_expert_returns_is_added(place, results) -> None:
    layer = drawn("random", place[1], place[0])
    for rank, result in enumerate(results):
        part, without = parts_of(layer, rank, place[1], "random", place[0]), result[transports(*place)[-1], "random"]
        x, d_out = (part[name].to(without["out"].device) for name in ("x", "d_out"))
        assert torch.equal(result["shared"]["out"], without["out"] + 2 * x)
        torch.testing.assert_close(result["shared"]["x"], without["x"] + 2 * d_out)
        assert torch.equal(result["shared"]["w_down"], without["w_down"])


def test_without_a_group_is_one_sentence() -> None:
    with pytest.raises(ValueError, match="a process group that this rank is in"):
        called(parts_of(drawn("random", 2, "cpu"), 0, 2, "random", "cpu"))


NAMES = {
    "gate_up_proj": "w_gate_up",
    "down_proj": "w_down",
    "gate_up_proj_bias": "b_gate_up",
    "down_proj_bias": "b_down",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_split_module_computes_what_the_whole_one_does(place, results, way) -> None:
    device, world = place
    if device == "cuda" or (world == 4 and way != "in fsdp"):
        pytest.skip("the style is tested on CPUs, in four processes with FSDP alone")
    layer = drawn("random", world, device)
    if way == "of transformers":
        layer.biases = {name: bias * 0 for name, bias in layer.biases.items()}
    truth, ranks = alone(layer), [result["modules"][way] for result in results]
    for name in ranks[0]:
        of_tokens = name in ("out", "x", "weights")
        got = torch.cat([rank[name] for rank in ranks]) if of_tokens else ranks[0][name]
        torch.testing.assert_close(got.double(), truth[NAMES.get(name, name)], rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
