import gzip
import sys
from pathlib import Path

import pytest
import torch
from places import ROOT
from trained import CPU, idx, write_mnist

from swiglu_bench.cases.errors import BadInput
from swiglu_bench.tasks.train import model as models
from swiglu_bench.tasks.train.model import IDX_FILES, default_model, digits, load_sizes, mnist, text

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


# Data


@pytest.mark.parametrize("zipped", [False, True])
def test_mnist_is_read_plain_or_zipped_and_held_out_images_count_once(tmp_path: Path, zipped: bool) -> None:
    found = mnist(write_mnist(tmp_path, zipped=zipped), 16, CPU)
    assert (found.train[0].shape, found.train[0].dtype, found.steps_per_epoch) == ((70, 16), torch.float32, 4)
    assert found.train[0].abs().max() <= 1
    brightest = found.train[0].reshape(70, 8, 2).sum(-1).argmax(1)
    assert torch.equal(brightest, found.train[1]), "images and labels belong together"
    batches = list(found.held_out())
    assert all(len(batch[0]) == 16 for batch, _ in batches), "the last is padded: shapes are static"
    assert torch.equal(torch.cat([batch[0][:rows] for batch, rows in batches]), found.test[0])


def test_what_is_missing_or_incomplete_is_named(tmp_path: Path) -> None:
    for folder, message in (
        (None, r"needs --data FOLDER, with train-images-idx3-ubyte, .*FOLDER/MNIST/raw"),
        (tmp_path, r"train-images-idx3-ubyte is not there, nor .*gz; expected train-images-idx3"),
    ):
        with pytest.raises(BadInput, match=message):
            mnist(folder, 16, CPU)
    raw = write_mnist(tmp_path) / "MNIST" / "raw"
    whole = (raw / IDX_FILES[1]).read_bytes()
    torn, wrong_type = gzip.compress(whole)[:-20], whole.replace(b"\0\0\x08", b"\0\0\x0d")
    for content in (whole[:-1], whole + b"0", whole[:2], b"", b"\x1f\x8b\x08broken", torn, wrong_type):
        (raw / IDX_FILES[1]).write_bytes(content)
        with pytest.raises(BadInput, match="train-labels-idx1-ubyte is not a complete IDX file"):
            mnist(tmp_path, 16, CPU)
    for content, size, message in (
        (idx(torch.arange(3).numpy()), 16, "70 images and train-labels-idx1-ubyte 3 labels"),
        (whole, 71, "fewer than a batch of 71"),
    ):
        (raw / IDX_FILES[1]).write_bytes(content)
        with pytest.raises(BadInput, match=message):
            mnist(tmp_path, size, CPU)


def test_batches_are_a_function_of_seed_and_step(tmp_path: Path) -> None:
    found = mnist(write_mnist(tmp_path), 16, CPU)
    first = [found.batch(0, step) for step in range(8)]
    models._order.cache_clear()
    again = [found.batch(0, step) for step in reversed(range(8))][::-1]
    assert all(map(torch.equal, sum(first, ()), sum(again, ())))
    assert not torch.equal(first[0][0], found.batch(1, 0)[0]), "another seed"
    assert not torch.equal(first[0][0], first[4][0]), "another epoch"
    epoch = torch.cat([inputs for inputs, _ in first[:4]])
    assert len(epoch.unique(dim=0)) == len(epoch), "no image twice in an epoch"


def test_digits_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn", reason="the extra `train` is not installed")
    found = digits(64, CPU)
    assert (len(found.train[0]), len(found.test[0]), found.steps_per_epoch) == (1437, 360, 22)
    assert "360 held out" in found.about
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(BadInput, match="needs scikit-learn; install it with"):
        digits(64, CPU)


def test_text_is_bytes_with_the_last_tenth_held_out(tmp_path: Path) -> None:
    file = tmp_path / "text"
    content = bytes(251 if index >= 3600 else index % 251 for index in range(4000))
    file.write_bytes(content)
    found = text(file, 16, 4, CPU)
    inputs, targets = found.batch(0, 3)
    assert inputs.shape == (4, 16)
    assert torch.equal(inputs, targets)
    same = [torch.equal(inputs, found.batch(seed, step)[0]) for seed, step in ((0, 3), (0, 4), (1, 3))]
    assert same == [True, False, False]
    assert bytes(inputs[0].tolist()) in content
    assert max(int(found.batch(0, step)[0].max()) for step in range(300)) < 251, "the held-out part is never trained on"
    held = [batch[0] for batch, rows in found.held_out() if rows == 4]
    assert torch.cat(held).flatten().tolist() == [251] * 384
    assert len(text(None, 64, 2, CPU).train) > 10**6, "the standard library's"
    (tmp_path / "short").write_text("abc")
    for name, message in (("short", "short has 3 bytes; at least 704 are"), ("none", "none cannot be read: No such")):
        with pytest.raises(BadInput, match=message):
            text(tmp_path / name, 16, 4, CPU)
