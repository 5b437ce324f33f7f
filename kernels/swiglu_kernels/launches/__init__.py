"""What a kernel launch is made of: where kernels can run, tiles, the launch as data, its reuse."""
