"""A tuned choice."""

from swiglu_kernels.tiles.candidates import Choice
from swiglu_kernels.tiles.rules import Tile
from swiglu_kernels.tiles.tuning import TunedEntry, TunedMachine

HERE = TunedMachine("NVIDIA Test", "9.0", "2.0", "3.0", "abc")


TILE = Tile(16, 64, 64, warps=4, stages=2)
ENTRY = TunedEntry(
    HERE, "forward", "float16", 8, 32, 64, Choice("portable", TILE), (0.9, 0.89, 0.91), "2026-01-01T00:00:00Z"
)
