import pkgutil

import pytest

from swiglu_bench.measure.replaced import put_back


@pytest.mark.parametrize(
    "name",
    [
        "time.perf_counter",
        "torch.cuda.synchronize",
        "torch.cuda.Event.elapsed_time",
        "torch.equal",
        "torch.Tensor.norm",
        "torch.nn.functional.silu",
        "torch.matmul",
    ],
)
def test_a_replaced_function_is_named_and_put_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert put_back() == []
    real = pkgutil.resolve_name(name)
    monkeypatch.setattr(name, lambda *arguments: real(*arguments))
    assert put_back() == [name]
    assert pkgutil.resolve_name(name) is real
