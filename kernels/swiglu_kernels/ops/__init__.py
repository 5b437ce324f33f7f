"""The operations, a folder each: definition, operation, portable and hand-scheduled kernels, and their choice."""
