import json
import re

from command_line import swiglu_bench

from swiglu_bench.cases.shapes import config_names
from swiglu_bench.contenders import CATALOGUE


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
