import sys
from pathlib import Path

import pytest
import torch
from trained import idx, write_mnist

from swiglu_bench.spec.errors import BadInput
from swiglu_bench.train import data
from swiglu_bench.train.data import IDX_FILES, Text, digits, mnist, text

CPU = torch.device("cpu")


@pytest.mark.parametrize("zipped", [False, True])
def test_mnist_is_read_as_it_is_or_zipped(tmp_path: Path, zipped: bool) -> None:
    found = mnist(write_mnist(tmp_path, zipped=zipped), 16, CPU)
    assert found.train[0].shape == (70, 16)
    assert found.train[0].dtype == torch.float32
    assert found.train[0].min() >= -1
    assert found.train[0].max() <= 1
    assert found.steps_per_epoch == 4
    brightest = found.train[0].reshape(70, 8, 2).sum(-1).argmax(1)
    assert torch.equal(brightest, found.train[1]), "images and labels belong together"


def test_what_is_missing_or_torn_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"needs --data FOLDER, with train-images-idx3-ubyte, .*FOLDER/MNIST/raw"):
        mnist(None, 16, CPU)
    with pytest.raises(BadInput, match=r"train-images-idx3-ubyte is not there, nor .*gz; expected train-images-idx3"):
        mnist(tmp_path, 16, CPU)
    raw = write_mnist(tmp_path) / "MNIST" / "raw"
    whole = (raw / IDX_FILES[1]).read_bytes()
    for content in (whole[:-1], whole[:2], b"", b"\x1f\x8b\x08broken", whole.replace(b"\0\0\x08", b"\0\0\x0d")):
        (raw / IDX_FILES[1]).write_bytes(content)
        with pytest.raises(BadInput, match="train-labels-idx1-ubyte is not a whole IDX file"):
            mnist(tmp_path, 16, CPU)
    (raw / IDX_FILES[1]).write_bytes(idx(torch.arange(3).numpy()))
    with pytest.raises(BadInput, match="70 images and train-labels-idx1-ubyte 3 labels"):
        mnist(tmp_path, 16, CPU)
    (raw / IDX_FILES[1]).write_bytes(whole)
    with pytest.raises(BadInput, match="fewer than a batch of 71"):
        mnist(tmp_path, 71, CPU)


def test_batches_are_a_function_of_seed_and_step(tmp_path: Path) -> None:
    found = mnist(write_mnist(tmp_path), 16, CPU)
    first = [found.batch(0, step) for step in range(8)]
    data._order.cache_clear()
    again = [found.batch(0, step) for step in reversed(range(8))][::-1]
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    assert not torch.equal(first[0][0], found.batch(1, 0)[0]), "another seed"
    assert not torch.equal(first[0][0], first[4][0]), "another epoch"
    epoch = torch.cat([one[0] for one in first[:4]])
    assert len(epoch.unique(dim=0)) == len(epoch), "no image twice in an epoch"


def test_held_out_images_count_once(tmp_path: Path) -> None:
    found = mnist(write_mnist(tmp_path), 16, CPU)
    batches = list(found.held_out())
    assert all(len(batch[0]) == 16 for batch, _ in batches), "the last is padded: shapes are static"
    kept = torch.cat([batch[0][:rows] for batch, rows in batches])
    assert torch.equal(kept, found.test[0])


def test_digits_are_split(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="the extra `train` is not installed")
    found = digits(64, CPU)
    assert (len(found.train[0]), len(found.test[0]), found.steps_per_epoch) == (1437, 360, 22)
    assert "360 held out" in found.about


def test_digits_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(BadInput, match="needs scikit-learn; install it with"):
        digits(64, CPU)


def test_text_is_bytes_with_the_last_tenth_held_out(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(index % 251 for index in range(4000)))
    found = text(file, 16, 4, CPU)
    inputs, targets = found.batch(0, 3)
    assert inputs.shape == (4, 16)
    assert torch.equal(inputs, targets)
    assert torch.equal(inputs, found.batch(0, 3)[0])
    assert not torch.equal(inputs, found.batch(0, 4)[0])
    assert not torch.equal(inputs, found.batch(1, 3)[0])
    held = torch.cat([batch[0].flatten() for batch, _ in found.held_out()])
    assert torch.equal(held, found.tokens[3600 : 3600 + len(held)].long())
    assert len(held) == 384


def test_text_of_the_standard_library_and_too_little_of_it(tmp_path: Path) -> None:
    found = text(None, 64, 2, CPU)
    assert "standard library" in found.about
    assert len(found.tokens) > 10**6
    (tmp_path / "short").write_text("abc")
    with pytest.raises(BadInput, match="short has 3 bytes; at least 704 are needed"):
        text(tmp_path / "short", 16, 4, CPU)
    with pytest.raises(BadInput, match="none cannot be read: No such file"):
        text(tmp_path / "none", 16, 4, CPU)


def test_training_never_reads_what_is_held_out() -> None:
    tokens = torch.arange(2000, dtype=torch.int32)
    found = Text("", tokens, 16, 8)
    assert max(int(found.batch(0, step)[0].max()) for step in range(300)) < 1800
