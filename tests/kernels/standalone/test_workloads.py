"""Every tunable kernel's own tensors: what it writes is what eager says, whichever the tile."""

import pytest
import torch

from swiglu_bench.tasks.tune import difference
from swiglu_kernels.hopper import shared
from swiglu_kernels.runtime.backend import backend_for
from swiglu_kernels.runtime.launch import Launch
from swiglu_kernels.standalone.covering import meta
from swiglu_kernels.standalone.workloads import LayerTensors, Workload, by_hand, dense_shapes, workload
from swiglu_kernels.tiles.candidates import KERNELS, TileProblem, candidates

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_kernels = pytest.mark.skipif(backend_for(DEVICE) == "torch", reason="no GPU, and Triton's interpreter is off")


def made(kernel: str) -> Workload:
    capability = torch.cuda.get_device_capability() if DEVICE.type == "cuda" else None
    mixture = {"experts": 4, "top_k": 2} if kernel.startswith("experts") else {}
    return workload(kernel, TileProblem(20, 48, 64, torch.float16, capability, **mixture), DEVICE)


@needs_kernels
@pytest.mark.parametrize("kernel", KERNELS)
def test_all_tiles_write_the_same_everywhere(kernel: str) -> None:
    work = made(kernel)
    results = []
    for choice in candidates(kernel, work.problem, 3):
        for one in work.outputs:
            one.fill_(float("nan"))
        launch = work.describe(choice)
        if isinstance(launch, Launch):
            assert (launch.num_warps, launch.num_stages) == (choice.tile.warps, choice.tile.stages)
        launch.run()
        assert all(one.isfinite().all() for one in work.outputs)
        results.append([one.clone() for one in work.outputs])
    assert len(results) > 2
    for result in results[1:]:
        assert difference(result, results[0]) == ""


def test_an_unknown_kernel() -> None:
    with pytest.raises(ValueError, match=r"expected a name of candidates.KERNELS, got 'backward'"):
        made("backward")


@pytest.mark.skipif(shared.GLUON_MISSING is not None, reason=f"{shared.GLUON_MISSING}")
def test_what_a_launch_by_hand_does_not_write_is_not_allocated() -> None:
    """It would stay NaN, and be taken for a wrong result."""
    layer = LayerTensors(dense_shapes(64, 256, 256), meta())
    _, launch = next(by_hand("dW", layer))
    assert isinstance(launch, Launch)
    assert [made is layer.d_w_gate for made in layer.written] == [True]
