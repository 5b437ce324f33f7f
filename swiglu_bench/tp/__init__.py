"""`swiglu-bench tp`: the tensor-parallel MLP on several GPUs, checked, timed and compared with one GPU.

command.py     options in, exit status out
plan.py        what is to be measured with how many ranks; what does not divide is refused here
run.py         one call of the command: folder, tables, and what a lost group of processes costs
launch.py      a group of processes from its parent's side; rank.py: from inside, also under torchrun
group.py       what ranks agree on, and the clock that times all of them
wires.py       which collectives there are, and their bytes; collectives.py runs them bare
figures.py     from samples to the figures of a row
contenders.py  an implementation on a rank's part of the weights, and the collectives around it
truth.py       the fp64 answer, computed by all ranks together
session.py     a case: checked, timed in rounds, turned into rows
row.py, files.py, tables.py, chart.py    what comes out
"""
