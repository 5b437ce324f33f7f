"""A mixture of experts: swiglu_experts."""
