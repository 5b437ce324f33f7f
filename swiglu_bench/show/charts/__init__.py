"""Charts that more than one command draws: a common style, and their export as pictures."""
