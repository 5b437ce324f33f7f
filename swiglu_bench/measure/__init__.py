"""From a callable to samples and figures. Nothing in here is about SwiGLU."""
