"""hazards: which of racecheck's reports are Triton's own dispatch of warps."""

import re
import sys
from pathlib import Path

import pytest

from swiglu_kernels.ops.glu import hopper_forward
from swiglu_kernels.standalone import hazards

LOG = """========= COMPUTE-SANITIZER
ok      0.84 roundings  one
{announced}
========= Error: Race reported between Read access at _kernel+0xf0 in one.py:8
=========     and Write access at _kernel+0x6560 in one.py:8 [7 hazards]
=========     and Write access at _kernel+0xa800 in one.py:{line} [13 hazards]
=========
========= RACECHECK SUMMARY: 1 hazards displayed (1 errors, 0 warnings)
"""


def test_those_of_this_process_are_announced(capsys: pytest.CaptureFixture[str]) -> None:
    hazards.announce()
    said = capsys.readouterr().out
    assert said.startswith(hazards.ANNOUNCED)
    source = Path(hopper_forward.__file__).read_text().splitlines()
    lines = [source[int(number) - 1].strip() for number in re.findall(r"hopper_forward\.py:(\d+)", said)]
    assert lines == ["def _forward_kernel(", "gl.warp_specialize("]


def test_the_command_says_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    monkeypatch.setattr(sys, "argv", ["hazards", str(log)])
    known = LOG.format(announced=f"{hazards.ANNOUNCED}one.py:8, one.py:11", line=11)
    for text, printed in (
        (known, "0 findings beyond"), (known.replace("py:11 [", "py:12 ["), "1 findings beyond"),
        (known.replace(": one.py:8", ": two.py:8"), "2 findings beyond"),
        (known.replace("(1 errors", "(8 errors"), "7 hazards that are not"), ("cut off", "racecheck's summary"),
    ):  # fmt: skip
        log.write_text(text)
        with pytest.raises(SystemExit) as ended:
            hazards.main()
        assert ended.value.code == int(text is not known)
        assert printed in capsys.readouterr().out
