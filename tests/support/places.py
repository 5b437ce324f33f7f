"""Where the checkout and the files of these tests are."""

from pathlib import Path

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
RESULTS = ROOT / "results" / "nvidia-h200"
