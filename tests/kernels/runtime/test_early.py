"""Launches that begin before the one ahead has ended."""

import pytest
import torch

from swiglu_kernels import reference, swiglu_experts
from swiglu_kernels.ops.gate.operation import backward_launch, forward_launch
from swiglu_kernels.runtime import early
from swiglu_kernels.runtime.backend import TRITON_AVAILABLE, describing_for
from swiglu_kernels.standalone.compiled import _waits_first

pytestmark = pytest.mark.skipif(not TRITON_AVAILABLE, reason="Triton is not installed")


@pytest.mark.parametrize(("capability", "may"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), False)])
def test_on_hopper_they_may(capability, may, monkeypatch):
    monkeypatch.setattr(early, "INTERPRETING", False)
    meta = torch.empty(8, device="meta")
    with describing_for(capability):
        launches = forward_launch(*3 * [meta]), backward_launch(*5 * [meta])
    for launch in launches:
        assert launch.arguments["EARLY"] is launch.options.get("launch_pdl", False) is may


def test_not_in_the_interpreter_nor_on_a_cpu(monkeypatch):
    on_cpu = [torch.empty(8)] * 3
    monkeypatch.setattr(early, "INTERPRETING", False)
    assert not forward_launch(*on_cpu).arguments["EARLY"]
    monkeypatch.setattr(early, "INTERPRETING", True)
    with describing_for((9, 0)):
        assert not forward_launch(*on_cpu).arguments["EARLY"]


@pytest.mark.parametrize(
    ("ptx", "first"),
    [
        ("ld.param.b64 %rd1; griddepcontrol.wait; ld.global.b32 %r1;", True),
        ("ld.param.b64 %rd1; ld.global.b32 %r1; griddepcontrol.wait;", None),
        ("ld.shared.b32 %r2, [global_smem]; griddepcontrol.wait; ld.global.b32 %r1;", True),
        ("cp.async.bulk.tensor.2d; griddepcontrol.wait;", False),
        ("st.global.b32 [%rd1], 1;", False),
        ("ret;", False),
    ],
)
def test_what_the_compiler_makes_is_looked_at(ptx, first):
    assert _waits_first(ptx) is bool(first)
    assert _waits_first(ptx, may_read=True) is (first is not False)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(1, 64, 96), (40, 1960, 3672), (300, 4096, 11008)])
def test_what_the_launch_ahead_writes_is_read(size):
    """Products of PyTorch, and the gate behind them, over and over in the same memory."""
    tokens, hidden, intermediate = size
    weights = [torch.randn(hidden, intermediate, device="cuda", dtype=torch.bfloat16) / hidden**0.5 for _ in range(2)]
    gate, up, h = (torch.empty(tokens, intermediate, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    launch = forward_launch(gate, up, h)
    found, wanted = [], []
    for number in range(50):
        x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16) * (number + 1)
        for weight, out in zip(weights, (gate, up), strict=True):
            torch.mm(x, weight, out=out)
        launch.run()
        found.append(h.clone())
        torch.mm(x, weights[0], out=up)  # what is read is written behind it
        torch.mm(x, weights[1], out=gate)
        wanted.append(reference.silu_mul(up, gate))
    torch.cuda.synchronize()
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=2**-6, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "slots"), [(1, 8), (4, 8), (16, 4)])  # without and with a routing
def test_experts_read_what_was_written_just_before(tokens, slots):
    """Weights, index and tokens change in the same memory, by the launch ahead of ours."""
    count, hidden, intermediate = 16, 1024, 512
    w_gate_up = torch.randn(count, 2 * intermediate, hidden, device="cuda", dtype=torch.bfloat16) / hidden**0.5
    w_down = torch.randn(count, hidden, intermediate, device="cuda", dtype=torch.bfloat16) / intermediate**0.5
    x = torch.empty(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    index = torch.empty(tokens, slots, device="cuda", dtype=torch.int64)
    weights = torch.empty(tokens, slots, device="cuda", dtype=torch.bfloat16)
    changed = (x, index, weights, w_gate_up, w_down)
    found, kept = [], []
    with torch.no_grad():
        for number in range(30):
            x.normal_()
            weights.uniform_()
            index.copy_(torch.rand(tokens, count, device="cuda").topk(slots).indices)
            changed[3 + number % 2].neg_()
            found.append(swiglu_experts(x, w_gate_up, w_down, index, weights))
            kept.append([tensor.clone() for tensor in changed])
    for got, (x, index, weights, w_gate_up, w_down) in zip(found, kept, strict=True):
        wanted = reference.swiglu_experts(x.double(), w_gate_up.double(), w_down.double(), index, weights.double())
        assert (got.double() - wanted).norm() <= 0.01 * wanted.norm()
