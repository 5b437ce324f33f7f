"""swiglu-bench: measure, validate and compare implementations of SwiGLU."""

__version__ = "0.1.0"
