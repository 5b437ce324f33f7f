"""`swiglu-bench train`: whether the same model, with a faster kernel in it, trains the same and faster."""
