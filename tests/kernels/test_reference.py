import math

import torch
import torch.nn.functional as F

from swiglu_kernels import reference


def test_silu_mul_by_hand():
    gate, up = [0.5, -2.0, 0.0], [3.0, -1.0, 7.0]
    expected = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
    got = reference.silu_mul(torch.tensor(gate, dtype=torch.float64), torch.tensor(up, dtype=torch.float64))
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


def test_glu_and_mlp_are_the_linear_layers_that_models_have():
    torch.manual_seed(0)
    gate_proj, up_proj = torch.nn.Linear(6, 5, bias=False), torch.nn.Linear(6, 5, bias=False)
    down_proj = torch.nn.Linear(5, 6, bias=False)
    x = torch.randn(2, 3, 6)
    z = F.silu(gate_proj(x)) * up_proj(x)
    assert torch.equal(reference.swiglu_glu(x, gate_proj.weight, up_proj.weight), z)
    assert torch.equal(reference.swiglu_mlp(x, gate_proj.weight, up_proj.weight, down_proj.weight), down_proj(z))
