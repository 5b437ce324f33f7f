from pathlib import Path

import torch
from trained import contender, images

from swiglu_bench.measure.rounds import Rule
from swiglu_bench.train.alone import measure


def test_ratios_measured_now(tmp_path: Path) -> None:
    rule = Rule(warmup_rounds=1, min_rounds=3, max_rounds=4, min_s=0, budget_s=1)
    contenders = [contender("eager"), contender("eager-packed")]
    case = images(tmp_path).case()
    found = measure(contenders, case, torch.device("cpu"), rule, "eager")
    assert found.keys() == {"eager-packed"}
    assert found["eager-packed"] > 0
    assert measure(contenders[1:], case, torch.device("cpu"), rule, "eager") == {}
