"""The real command line, started in a folder that holds other code of the same names."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

import swiglu_bench

pytestmark = pytest.mark.timed

OPTIONS = ("--shapes", "24x40", "--tokens", "3", "--impl", "eager,eager-packed", "--device", "cpu", "--budget", "0.1")


def test_a_run_beside_altered_copies_times_the_installed_code(tmp_path: Path) -> None:
    here, programs = tmp_path / "here", tmp_path / "bin"
    for name in ("swiglu_bench", "swiglu_kernels", "torch", "numpy", "json"):
        (here / name).mkdir(parents=True)
        told = f"open({str(tmp_path / 'imported')!r}, 'a').write({name!r})\nraise SystemExit('imported')\n"
        (here / name / "__init__.py").write_text(told, encoding="utf-8")
        (here / f"{name}.py").write_text(told, encoding="utf-8")
    programs.mkdir()
    script = "import sys\nfrom swiglu_bench.cli.app import main\nsys.exit(main())\n"  # as pip writes it
    (programs / "swiglu-bench").write_text(script, encoding="utf-8")
    installed = [os.path.abspath(folder) for folder in sys.path if folder]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    environment |= {"PYTHONPATH": os.pathsep.join(installed), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, programs / "swiglu-bench", "forward", *OPTIONS, "--out", tmp_path / "run"]
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 1, 3), done.stdout + done.stderr
    assert not (tmp_path / "imported").exists()
    with (tmp_path / "run" / "records.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["implementation"] for row in rows] == ["eager", "eager-packed"]
    assert {row["status"] for row in rows} <= {"ok", "unsettled"}, "on a busy machine the wall clock settles nothing"
    assert Path(swiglu_bench.__file__).parent.parent != here
