"""Pictures of a report in Chromium, for docs/report.md: on two widths of screen, light and dark, and printed.

`make pictures` runs this; it needs chromium and pdftoppm (Debian, Ubuntu: apt install chromium poppler-utils).
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUNS = ("forward", "step-mlp", "memory-mlp", "tp/llama7b")
"""Of results/nvidia-h200."""
SCREENS = {"wide": (1280, 1180, RUNS), "narrow": (390, 1420, RUNS[:1])}
"""By name: the window's width and height, and the runs in the page; a narrow window folds the sections of several."""


def browser(*arguments: str) -> None:
    """Run Chromium without a window until the page's charts are drawn."""
    own = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=20000")
    subprocess.run(["chromium", *own, *arguments], check=True, capture_output=True, timeout=120)


def main() -> None:
    """Write docs/figures/report-*.png."""
    figures = ROOT / "docs" / "figures"
    with tempfile.TemporaryDirectory() as temporary:
        page, pdf = Path(temporary) / "report.html", Path(temporary) / "report.pdf"
        for name, (width, height, runs) in reversed(SCREENS.items()):
            folders = [f"results/nvidia-h200/{run}" for run in runs]
            command = [sys.executable, "-m", "swiglu_bench", "report", *folders, "--output", str(page)]
            subprocess.run(command, check=True, cwd=ROOT)
            for ends, dark in (("", False), ("-dark", True)):
                browser(
                    f"--window-size={width},{height}", f"--blink-settings=preferredColorScheme={int(not dark)}",
                    f"--screenshot={figures / f'report-{name}{ends}.png'}", page.as_uri(),
                )  # fmt: skip
        browser("--no-pdf-header-footer", f"--print-to-pdf={pdf}", page.as_uri())
        first = ["pdftoppm", "-png", "-singlefile", "-r", "80", str(pdf), str(figures / "report-print")]
        subprocess.run(first, check=True)


if __name__ == "__main__":
    main()
