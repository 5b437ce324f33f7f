from pathlib import Path

import pytest

from swiglu_bench.spec.errors import BadInput
from swiglu_bench.train.workload import Llama, load, names, usual


def test_every_model_of_the_suite_can_be_read() -> None:
    assert names() == ["digits", "llama-1b", "llama-tiny", "mnist"]
    for name in names():
        workload = load(name.split("-")[0], name)
        assert workload.tokens > 0


def test_each_task_has_its_own_and_llama_one_for_a_gpu() -> None:
    assert usual("digits", on_gpu=True) == "digits"
    small, large = (load("llama", usual("llama", on_gpu)) for on_gpu in (False, True))
    assert isinstance(small, Llama)
    assert isinstance(large, Llama)
    assert (small.layers, large.layers, large.sequence) == (2, 16, 4096)


def test_a_name_that_is_none_and_one_of_another_task() -> None:
    with pytest.raises(BadInput, match="there is no model 'llama-2b'; did you mean llama-1b"):
        load("llama", "llama-2b")
    with pytest.raises(BadInput, match=r"is of the task mnist; give --task mnist"):
        load("llama", "mnist")


def test_a_mistake_names_file_and_line(tmp_path: Path) -> None:
    text = "task: llama\nhidden: 36\nintermediate: 64\nlayers: 1\nheads: {}\nkv_heads: 1\nsequence: 8\nbatch: 1\n"
    text += "learning_rate: 1.0e-3\nsteps: 3\nsource: here\n"
    path = tmp_path / "own.yaml"
    path.write_text(text.format("none"))
    with pytest.raises(BadInput, match=r"own.yaml:5: heads: .*found 'none'"):
        load("llama", str(path))
    path.write_text(text.format(4))
    with pytest.raises(BadInput, match="even multiple of heads"):
        load("llama", str(path))
    path.write_text(text.format(2))
    assert load("llama", str(path)).tokens == 8
