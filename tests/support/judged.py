"""What the judge says of results of this process."""

from collections.abc import Iterable

from torch import Tensor

from swiglu_bench.check.built import Produced
from swiglu_bench.check.inputs import Draw
from swiglu_bench.check.judge import Judge
from swiglu_bench.check.results import form_fault
from swiglu_bench.rows.record import TensorCheck


def judge_here(judge: Judge, produced: Produced, draw: Draw, others: Iterable[Tensor] = ()) -> tuple[TensorCheck, ...]:
    """Verdicts on results, their form included; `others` are tensors whose memory none may share."""
    truth, others = judge.truth(draw, backward=produced.keys() != {"output"}), list(others)
    found = {
        name: form_fault(value, truth.values[name].shape, judge.dtype, judge.problem.device, others)
        for name, value in produced.items()
    }
    return judge.judge(produced, draw, faults={name: fault for name, fault in found.items() if fault})
