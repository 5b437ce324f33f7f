"""What `ncu --csv --page raw` writes, by its documentation, and the suite's clock against the profiler's.

The lines are one of names, one of units in base units, and one for each kernel; lines of ncu's own begin with `==`.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

from swiglu_bench.measure import profilers
from swiglu_bench.measure.profilers import REPEATS, Agreement, Counters, NoCounters, counters, parse

HEAD = '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC"'  # noqa: E501
METRICS = ("dram__bytes.sum", profilers.TIME, "launch__registers_per_thread", "lts__t_bytes.sum", profilers.TENSOR)
UNITS = ",".join(['""'] * 11 + ['"byte","nsecond","register/thread","byte","%"'])
SAMPLE = f"""==PROF== Connected to process 4242 (/usr/bin/python3.11)
==PROF== Profiling "forward_kernel": 0%....50%....100% - 3 passes
==PROF== Profiling "copy, or so": 0%....50%....100% - 3 passes
==PROF== Disconnected from process 4242
{HEAD},"{'","'.join(METRICS)}"
{UNITS}
"0","4242","python3.11","127.0.0.1","forward_kernel","1","7","(384, 1, 1)","(132, 1, 1)","0","9.0","301,989,888","900,000","168","1,207,959,552","80.5"
"1","4242","python3.11","127.0.0.1","copy, or so","1","7","(256, 1, 1)","(64, 1, 1)","0","9.0","1,000","100,000","32","2,000","0"
"""  # noqa: E501


def test_figures_are_those_of_all_kernels_and_a_counter_that_the_gpu_does_not_have_is_left_out() -> None:
    assert parse(SAMPLE) == Counters(pytest.approx(72.45), 301_990_888, 1_207_961_552, 168)
    assert parse(SAMPLE.replace('"80.5"', '"n/a"')) == Counters(None, 301_990_888, 1_207_961_552, 168)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on "
         "the target device 0.", "NVreg_RestrictProfilingToAdminUsers"),
        ("==PROF== Connected to process 1\nTraceback (most recent call last):\nValueError: no such thing",
         "ValueError: no such thing"),
        ("==ERROR== Failed to find metric regex:^x$\n", "Failed to find metric"),
        ("", "nothing"),
    ],
)  # fmt: skip
def test_why_there_are_none(text: str, word: str) -> None:
    with pytest.raises(NoCounters, match=word) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def fake_ncu(folder: Path, text: str = SAMPLE) -> str:
    """A program that takes ncu's options, runs what follows them, and writes what ncu would."""
    file = folder / "ncu"
    file.write_text(
        f"#!{sys.executable}\nimport subprocess, sys\nplace = sys.argv.index('--log-file')\n"
        f"assert sys.argv[1:4] == ['--csv', '--page', 'raw']\n"
        f"open(sys.argv[place + 1], 'w').write({text!r})\nsys.exit(subprocess.call(sys.argv[place + 2:]))\n",
        encoding="utf-8",
    )
    file.chmod(0o755)
    return str(file)


@pytest.mark.skipif(os.name == "nt", reason="the stand-in is a script")
def test_the_program_runs_under_ncu(tmp_path: Path) -> None:
    program = [sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w')"]
    assert counters(fake_ncu(tmp_path), program).registers_per_thread == 168
    assert (tmp_path / "ran").exists()
    with pytest.raises(NoCounters, match="failed"):
        counters(str(tmp_path / "absent"), program)
    with pytest.raises(NoCounters, match="division"):
        counters(fake_ncu(tmp_path, ""), [sys.executable, "-c", "1 / 0"])


@pytest.mark.parametrize(
    ("ours", "between", "holds"),
    [(101.9, 0, True), (102.1, 0, False), (97.9, 0, False), (105, 5, True), (111, 11, False), (108, 5, False)],
)
def test_two_percent_is_the_limit_beside_what_lies_between_events_and_kernels(
    ours: float, between: float, holds: bool
) -> None:
    assert Agreement("w", ours, 100.0, between).holds is holds


@pytest.mark.parametrize(("count", "reason"), [(0, "saw no kernels"), (REPEATS + 1, "saw 31 kernels in 30 calls")])
def test_kernels_are_summed_by_call_where_they_can_be_told_apart(count: int, reason: str) -> None:
    assert profilers.per_call([1.0, 2.0, 3.0] * REPEATS) == [6.0] * REPEATS
    with pytest.raises(RuntimeError, match=reason):
        profilers.per_call([1.0] * count)


@pytest.mark.gpu
@pytest.mark.alone
def test_both_clocks_agree_on_a_gpu() -> None:
    found = list(profilers.agreements(torch.device("cuda", 0)))
    assert len(found) == 4
    assert all(isinstance(agreement, Agreement) and agreement.holds for agreement in found), found
