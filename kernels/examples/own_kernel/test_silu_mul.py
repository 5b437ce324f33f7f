"""pytest runs these wherever swiglu-bench is installed; workflow.yml does so for every pull request."""

from pathlib import Path

import torch

MINE = f"{Path(__file__).with_name('silu_mul.py')}:mine"
GPU = torch.cuda.is_available()
WHERE = {"shapes": "llama7b", "tokens": [128, 8192]} if GPU else {"shapes": "24x40", "tokens": [32], "device": "cpu"}


def test_it_is_right(assert_swiglu):
    """On a CPU Triton's interpreter runs the kernel."""
    rows = assert_swiglu(MINE, scope="activation", **({} if GPU else WHERE))
    assert set(rows["status"]) == {"ok"}


def test_it_is_no_slower_than_before(benchmark_swiglu):
    """With --swiglu-baseline NAME it fails for a regression; an interpreted kernel has no time, and is skipped."""
    benchmark_swiglu(MINE, scope="activation", **WHERE)
