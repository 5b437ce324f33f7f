"""Both projections and the gate: swiglu_glu and swiglu_glu_packed."""
