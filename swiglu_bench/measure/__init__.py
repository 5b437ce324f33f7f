"""From a callable to samples and figures. Knows nothing of SwiGLU."""
