"""The matrix kernels in portable Triton, and the choice between them and the hand-scheduled ones."""
