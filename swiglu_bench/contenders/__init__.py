"""The built-in implementations, in the order in which tables show them. One file per family, imported without torch."""

from swiglu_bench.cases.implementation import Implementation
from swiglu_bench.contenders import experts, fp8, fused, peers, pytorch

ASYNC = "compile-async-tp"
ALLTOALL, DEEPEP = "megatron-alltoall", "megatron-deepep"
OF_RANKS = (ASYNC, ALLTOALL, DEEPEP)
"""Implementations that only `tp` has, in `split.py`, which imports torch."""

CATALOGUE: tuple[Implementation, ...] = (
    pytorch.eager, pytorch.eager_packed, pytorch.compiled, pytorch.compiled_packed, pytorch.compiled_max_autotune,
    peers.liger, peers.liger_mlp, fused.unsloth, peers.quack, peers.quack_tuned, peers.flash_swiglu_mlp,
    peers.tile_kernels, *fused.ROWS.values(), *experts.ROWS, *fp8.ROWS,
)  # fmt: skip
