"""What `kernels benchmark` times of the hub kernel, against the definition; `kernels/hub.py` puts it there."""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark


class SwiGLU(Benchmark):
    """`swiglu_mlp` at the sizes of Llama 7B, and of a small block on a CPU."""

    seed = 42

    def setup(self) -> None:
        """Draw x and weights."""
        tokens, hidden, intermediate = (32, 64, 160) if self.device == "cpu" else (1024, 4096, 11008)
        how = {"device": self.device, "dtype": torch.bfloat16}
        self.x = torch.randn(tokens, hidden, **how)
        self.w_gate, self.w_up = (torch.randn(intermediate, hidden, **how) * hidden**-0.5 for _ in range(2))
        self.w_down = torch.randn(hidden, intermediate, **how) * intermediate**-0.5

    def benchmark_mlp(self) -> None:
        """The whole block."""
        with torch.no_grad():
            self.out = self.kernel.swiglu_mlp(self.x, self.w_gate, self.w_up, self.w_down)

    def verify_mlp(self) -> torch.Tensor:
        """The same by PyTorch."""
        return (F.silu(self.x @ self.w_gate.T) * (self.x @ self.w_up.T)) @ self.w_down.T

    def benchmark_glu(self) -> None:
        """Both projections and the gate."""
        with torch.no_grad():
            self.out = self.kernel.swiglu_glu(self.x, self.w_gate, self.w_up)

    def verify_glu(self) -> torch.Tensor:
        """The same by PyTorch."""
        return F.silu(self.x @ self.w_gate.T) * (self.x @ self.w_up.T)
