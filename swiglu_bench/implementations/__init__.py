"""The built-in implementations, in the order in which tables show them. One file per family, imported without torch."""

from swiglu_bench.implementations import fused, liger, peers, pytorch, unsloth
from swiglu_bench.spec.implementation import Implementation

CATALOGUE: tuple[Implementation, ...] = (
    pytorch.eager,
    pytorch.eager_packed,
    pytorch.compiled,
    pytorch.compiled_packed,
    pytorch.compiled_max_autotune,
    liger.liger,
    unsloth.unsloth,
    peers.quack,
    peers.quack_tuned,
    peers.flash_swiglu_mlp,
    fused.silu_mul,
    fused.fused,
    fused.fused_dw_torch,
    fused.fused_dw_triton,
    fused.fused_preact,
    fused.fused_dw_torch_preact,
    fused.fused_dw_triton_preact,
    fused.fused_on_the_fly,
    fused.fused_auto,
    fused.fused_mlp,
    fused.fused_mlp_recompute,
    fused.fused_mlp_chunked,
    fused.fused_mlp_auto,
)
