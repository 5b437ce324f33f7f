from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from swiglu_bench.check.layout import find_layout

Apart = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def packed(given: dict[str, Tensor]) -> dict[str, Tensor]:
    gate, up = given["w_gate_up"].chunk(2)
    return {"w_gate": gate, "w_up": up, "w_down": given["w_down"]}


def interleaved(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"w_gate": given["w_gate_up"][0::2], "w_up": given["w_gate_up"][1::2], "w_down": given["w_down"]}


def transposed(given: dict[str, Tensor]) -> dict[str, Tensor]:
    gate, up = given["w_gate_up"].view(8, 3).T.unbind(0)[0:2]
    return {"w_gate": gate, "w_up": up, "w_down": given["w_down"].T}


def parameters() -> dict[str, Tensor]:
    return {"w_gate_up": torch.randn(6, 4), "w_down": torch.randn(4, 3)}


@pytest.mark.parametrize("apart", [packed, interleaved, transposed])
def test_gradients_are_taken_apart_as_to_canonical_would(apart: Apart) -> None:
    """By the views that it returned once: the implementation's own code is not called again."""
    calls: list[int] = []

    def counted(given: dict[str, Tensor]) -> dict[str, Tensor]:
        calls.append(1)
        return apart(given)

    layout = find_layout(parameters(), counted)
    gradients = parameters()
    expected = apart(gradients)
    found = layout.take_apart(gradients)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    for view in layout.views.values():
        view.of(gradients[view.parameter]).fill_(1.0)
    assert all(value.eq(1).all() for value in apart(gradients).values()), "weights are written by them, too"
    assert len(calls) == 1


def test_gradients_in_other_strides_or_amid_other_memory_come_out_right() -> None:
    layout, gradients = find_layout(parameters(), packed), parameters()
    odd = {name: torch.randn(9, *value.T.shape)[4].copy_(value.T).T for name, value in gradients.items()}
    assert not odd["w_gate_up"].is_contiguous()
    assert all(torch.equal(value, packed(gradients)[name]) for name, value in layout.take_apart(odd).items())


def test_what_has_no_gradient_yields_none_and_what_is_no_plain_tensor_stands_for_all_of_it() -> None:
    layout = find_layout(parameters(), packed)
    assert set(layout.take_apart({"w_down": torch.ones(4, 3)})) == {"w_down"}
    sparse = torch.ones(6, 4).to_sparse()
    found = layout.take_apart({"w_gate_up": sparse})
    assert found["w_gate"] is found["w_up"] is sparse


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (lambda given: packed(given) | {"w_up": given["w_gate_up"][3:].clone()}, "Tensor"),
        (lambda given: packed(given) | {"w_up": given["w_gate_up"][3:] * 1.0}, "Tensor"),
        (lambda given: packed(given) | {"w_up": None}, "NoneType"),
    ],
    ids=["a copy", "computed", "None"],
)
def test_a_to_canonical_that_does_more_than_look_is_refused(bad: Apart, kind: str) -> None:
    with pytest.raises(TypeError, match=f"'w_up' a {kind}"):
        find_layout(parameters(), bad)
