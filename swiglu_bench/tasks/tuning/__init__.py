"""Which tile of a kernel of swiglu_kernels is fastest on this GPU, and the file that keeps it."""
