"""Is it right: inputs, fp64 truth, tolerances, and what an implementation has to pass before it gets a time."""
