"""The gate alone, elementwise: silu_mul and Unsloth's kernels."""
