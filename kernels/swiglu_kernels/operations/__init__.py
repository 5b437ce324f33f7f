"""What a model calls: each file an operation with its gradients, as `swiglu_kernels` exports it."""
