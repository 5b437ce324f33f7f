"""What the command line reads before a command runs loads without torch: help and shell completion are instant."""

import subprocess
import sys

LIGHT = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module("swiglu_bench." + module)
    heavy = {"torch", "triton", "pandas", "wandb", "liger_kernel", "swiglu_kernels"} & set(sys.modules)
    assert not heavy, (module, heavy)
"""
MODULES = (
    "cli.app cases.cases cases.shapes cases.registry contenders rows.record rows.run_folder rows.finished_run "
    "options tasks.tp "
    "show.charts show.compare show.ranking show.history show.page show.documents show.console"
)


def test_data_options_and_what_shows_results_load_without_torch() -> None:
    subprocess.run([sys.executable, "-c", LIGHT, *MODULES.split()], timeout=60, check=True)
