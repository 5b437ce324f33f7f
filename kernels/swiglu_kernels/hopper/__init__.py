"""What the hand-scheduled kernels for Hopper (compute capability 9.0), in Gluon and PTX, have in common."""
