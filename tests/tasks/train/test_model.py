from pathlib import Path

import pytest
from places import ROOT

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.tasks.train.model import default_model, load_sizes

OWN = "task: llama\nhidden: 36\nintermediate: 64\nlayers: 1\nheads: {}\nkv_heads: 1\nsequence: 8\nbatch: 1\n"
OWN += "learning_rate: 1.0e-3\nsteps: 3\nsource: here\n"


def test_every_model_of_the_suite_can_be_read_and_each_task_has_one() -> None:
    for name in (path.stem for path in (ROOT / "configs" / "train").glob("*.yaml")):
        assert load_sizes(name.split("-")[0], name).tokens > 0
    defaults = [default_model(task, on_gpu) for task in ("digits", "llama") for on_gpu in (False, True)]
    assert defaults == ["digits", "digits", "llama-tiny", "llama-1b"]


@pytest.mark.parametrize(
    ("model", "heads", "message"),
    [
        ("llama-2b", 2, "there is no model 'llama-2b'; did you mean llama-1b"),
        ("mnist", 2, "is for the task mnist; give --task mnist"),
        ("own.yaml", "none", r"own.yaml:5: heads: .*found 'none'"),
        ("own.yaml", 4, "even multiple of heads"),
    ],
)
def test_a_mistake_is_named(
    model: str, heads: object, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(OWN.format(heads))
    with pytest.raises(BadInput, match=message):
        load_sizes("llama", model)
