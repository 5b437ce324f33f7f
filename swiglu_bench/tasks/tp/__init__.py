"""`swiglu-bench tp`: the tensor-parallel MLP on several GPUs, checked, timed and compared with one GPU.

plan.py has what is measured, judge.py what is judged on a rank, court.py all ranks as one court, run.py a case and the
command. Ranks are started and meet in worker/ranks.py; contenders/split.py puts collectives around implementations.
"""
