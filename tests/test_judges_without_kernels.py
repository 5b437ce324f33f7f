"""What judges works where swiglu_kernels is not: it imports nothing of it, and eager and the quantiser need nothing."""

import subprocess
import sys

JUDGES = (
    "tasks.contract.matrix check.judge check.quantised check.usage worker.worker tasks.selftest.run tasks.time "
    "tasks.untimed worker.court worker.judge_bench worker.workbench tasks.tp.judge tasks.train.run"
)
WITHOUT = """
import importlib, sys
sys.modules["swiglu_kernels"] = None  # an import raises ImportError
for module in sys.argv[1:]:
    importlib.import_module("swiglu_bench." + module)

from swiglu_bench.check.built import Built
from swiglu_bench.check.inputs import Draw, make_problem
from swiglu_bench.check.judge import Judge
from swiglu_bench.check.quantised import judge_of
from swiglu_bench.contenders import fp8, pytorch
from swiglu_bench.cases.cases import Case, Dtype, Experts, Mode, Precision, Scope, Shape

def verdicts(judge_class, implementation, scope, precision=Precision.UNQUANTISED):
    shape = Shape("small", 64, 96, "made up", (8,), Experts(4, 2) if scope is Scope.EXPERTS else None)
    problem = make_problem(Case(shape, 8, Dtype.BFLOAT16, scope, Mode.STEP, 0, precision), "cpu", seed=1)
    judge, right = judge_class(problem), Built(implementation, problem).train(Draw(2))
    wrong = {name: value * 1.1 for name, value in right.items()}
    return [[check.ok for check in judge.judge(produced, Draw(2))] for produced in (right, wrong)]

for scope in Scope:
    right, wrong = verdicts(Judge, pytorch.eager, scope)
    assert all(right) and not any(wrong), (scope, right, wrong)
for precision in filter(None, Precision):
    right, wrong = verdicts(judge_of(False, True, True), fp8.reference, Scope.MLP, precision)
    assert all(right) and not any(wrong), (precision, right, wrong)
assert not [name for name in sys.modules if name.startswith("swiglu_kernels.")]
"""


def test_a_right_and_a_wrong_result_are_told_apart_without_swiglu_kernels() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT, *JUDGES.split()], timeout=120, check=True)
