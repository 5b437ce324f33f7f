"""The whole block: swiglu_mlp."""
