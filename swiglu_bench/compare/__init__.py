"""Two runs side by side: what changed from one to the other, how surely, and what stands against comparing them."""
