"""Which kernel and which tile: by rule, among candidates, or as tuned on this GPU."""
