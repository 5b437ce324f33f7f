"""A sweep from its options to its exit status: cases, resuming, where rows go."""
