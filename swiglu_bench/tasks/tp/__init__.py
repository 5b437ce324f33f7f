"""`swiglu-bench tp`: the tensor-parallel MLP on several GPUs, checked, timed and compared with one GPU.

plan.py          what is to be measured with how many ranks; what does not divide is refused here
run.py           one call of the command: folder, tables, and what a lost group of ranks costs
case.py          the way of a case, from its implementations to their rows; figures.py: from samples to figures
place.py         all ranks of a group as one place of the session: questions out, answers merged
ranks.py         how they are asked: child processes of this one, or the processes that torchrun started
bench.py         what a rank does, and judge.py: how its results are judged
group.py         how ranks meet, and clocks that let them start together
contenders.py    an implementation on a rank's part of the weights, and the collectives around it
traffic.py       which collectives there are, and their bytes; collectives.py runs them bare
files.py         the folder
"""
