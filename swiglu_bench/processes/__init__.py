"""Which code runs in which process, and what the death of one costs."""
