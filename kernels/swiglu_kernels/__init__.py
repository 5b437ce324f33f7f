"""SwiGLU for training and inference: Triton kernels with a plain PyTorch reference beside them.

silu_mul(gate, up)                    elementwise, one rounding, gradients in new buffers
swiglu_glu(x, w_gate, w_up)           both products and the gate, on Hopper in one launch; biases, GeGLU, gpt-oss's gate
swiglu_glu_packed(x, w_gate_up)       the same with both projections in one matrix, three layouts
swiglu_mlp(x, w_gate, w_up, w_down)   the whole block, forward and backward
swiglu_glu_fp8(x, w_gate, w_up, recipe="rowwise")    the same two with fp8 products, by rows or by blocks
swiglu_mlp_fp8(x, w_gate, w_up, w_down, recipe="blockwise")
swiglu_experts(x, w_gate_up, w_down, top_k_index, top_k_weights)    a mixture of experts, each such a block
swiglu_experts_parallel(x, ...)       the same with the experts on several ranks
unsloth_silu_mul(gate, up)            Unsloth-style elementwise kernels, with autograd
swiglu_fg_kernel, swiglu_DWf_DW_dfg_kernel    the same kernels under the names that Unsloth documents
FusedSwiGLU                           a module in place of two Linears and the gate
FusedSwiGLUMLP, FusedSwiGLUPackedMLP  modules with the state_dict of a Llama, Qwen or Mistral MLP, and of Phi-3's
FusedSwiGLUExperts                    a module of stacked experts
register_experts()                    register swiglu_experts with transformers, for set_experts_implementation
patch_model(model), unpatch(model)    put them into a Hugging Face model, and take them out again
layers                                the same for `kernelize` of the package `kernels`
reference                             the definitions, in PyTorch
warm_up(model)                        compile what any token count needs, or those given, before the first request
check()                               admit the hand-scheduled kernels under this Triton, on this GPU
explain(x, w_gate, w_up)              which kernels a call runs, and why; explain_experts for swiglu_experts
backend_for(tensor)                   where a kernel would run: "triton", "interpreter" or "torch"
"""

from swiglu_kernels import reference
from swiglu_kernels.check import check
from swiglu_kernels.explain import explain, explain_experts
from swiglu_kernels.nn import layers
from swiglu_kernels.nn.experts_interface import register_experts
from swiglu_kernels.nn.modules import FusedSwiGLU, FusedSwiGLUExperts, FusedSwiGLUMLP, FusedSwiGLUPackedMLP
from swiglu_kernels.nn.patch import PatchReport, patch_model, unpatch
from swiglu_kernels.nn.warm_up import warm_up
from swiglu_kernels.ops.experts.operation import swiglu_experts
from swiglu_kernels.ops.experts.parallel import swiglu_experts_parallel
from swiglu_kernels.ops.fp8.operation import swiglu_glu_fp8, swiglu_mlp_fp8
from swiglu_kernels.ops.gate.operation import silu_mul
from swiglu_kernels.ops.gate.unsloth import swiglu_DWf_DW_dfg_kernel, swiglu_fg_kernel, unsloth_silu_mul
from swiglu_kernels.ops.glu.operation import swiglu_glu
from swiglu_kernels.ops.glu.packed import swiglu_glu_packed
from swiglu_kernels.ops.mlp.operation import swiglu_mlp
from swiglu_kernels.runtime.backend import backend_for

__all__ = [
    "FusedSwiGLU", "FusedSwiGLUExperts", "FusedSwiGLUMLP", "FusedSwiGLUPackedMLP", "PatchReport", "backend_for",
    "check", "explain", "explain_experts", "layers", "patch_model", "reference", "register_experts", "silu_mul",
    "swiglu_DWf_DW_dfg_kernel", "swiglu_experts", "swiglu_experts_parallel", "swiglu_fg_kernel", "swiglu_glu",
    "swiglu_glu_fp8", "swiglu_glu_packed", "swiglu_mlp", "swiglu_mlp_fp8", "unpatch", "unsloth_silu_mul", "warm_up",
]  # fmt: skip
