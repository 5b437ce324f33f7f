import json
import re

import torch
from command_line import swiglu_bench
from specimens import small_case

from swiglu_bench.cases.cases import Shape
from swiglu_bench.cases.shapes import config_names
from swiglu_bench.cli import listing
from swiglu_bench.contenders import CATALOGUE
from swiglu_bench.worker import policy
from swiglu_bench.worker.policy import Settings, Task

CPU = torch.device("cpu")


def test_a_dry_run_names_the_cases_and_their_memory() -> None:
    cases = [small_case(tokens=3), small_case(tokens=7, shape=Shape("wide", 4096, 11008, "made up", (1,)))]
    settings = Settings(Task.TIME, CPU, "c", "r")
    need = [policy.needed_bytes(settings, case) for case in cases]
    free_bytes = int(max(need)) - 1
    assert [bool(policy.too_large(settings, case, free_bytes)) for case in cases] == [False, True]
    rows = listing.planned(settings, cases, free_bytes)
    assert [(row["fits"], row["needed_bytes"]) for row in rows] == [(True, int(need[0])), (False, int(need[1]))]


def test_nothing_is_lost_in_detail_or_for_programs() -> None:
    text = swiglu_bench("list", "--device", "cpu", "--detail", "--shapes", "--machine", width=60).out
    text += swiglu_bench("list", "--device", "cpu", "--detail", width=60).out
    assert all(len(line) <= 60 for line in text.splitlines())
    assert "Triton kernels need a GPU;" in " ".join(text.split())
    told = json.loads(swiglu_bench("list", "--device", "cpu", "--format", "json").out)
    assert [entry["name"] for entry in told["implementations"]] == [known.name for known in CATALOGUE]
    assert sorted(one["name"] for one in (*told["shapes"], *told["sweeps"])) == config_names()
    for name in (*(one.name for one in CATALOGUE), *config_names()):
        assert re.search(rf"^ ?{re.escape(name)}\b", text, flags=re.MULTILINE), name
