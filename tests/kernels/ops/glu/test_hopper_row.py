"""The forward for up to 128 tokens that is scheduled by hand for Hopper."""

import pytest
import torch
from on_hopper import check_against_fp64, needs_hopper

from swiglu_kernels.ops.glu import hopper_forward, hopper_row
from swiglu_kernels.runtime.launch import Launch


@pytest.mark.parametrize(("intermediate", "columns"), [(11008, 88), (18944, 72), (2880, 24), (8, 8)])
def test_every_multiprocessor_has_an_equal_share(intermediate: int, columns: int) -> None:
    assert hopper_row.tile_for(intermediate, 132).columns == columns
    assert -(-intermediate // columns) <= 132 * -(-intermediate // (132 * 128))


class TestOnHopper:
    pytestmark = needs_hopper

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("store", [False, True], ids=["z", "z, gate, up"])
    @pytest.mark.parametrize(
        "shape",
        [
            (1, 64, 96), (16, 4096, 11008), (65, 64, 8), (77, 520, 1000), (100, 2880, 2880), (128, 4096, 14336),
            (128, 3584, 18944), (128, 7168, 2048), (128, 512, 16896),
        ],
    )  # fmt: skip
    def test_against_fp64(self, shape: tuple[int, int, int], store: bool, dtype: torch.dtype) -> None:
        check_against_fp64(hopper_row.forward_launch, shape, store, dtype)

    def test_what_another_kernel_left_in_shared_memory_does_not_matter(self) -> None:
        """Kernels look for their buffers by marks, and shared memory keeps those of the kernel before."""
        x = torch.randn(128, 512, device="cuda").bfloat16()
        launches: list[tuple[Launch, torch.Tensor]] = []
        for intermediate in (11008, 2880, 1000):
            weights = [torch.randn(intermediate, 512, device="cuda").bfloat16() for _ in range(2)]
            for module in (hopper_forward, hopper_row):
                z = x.new_empty(128, intermediate)
                launches.append((module.forward_launch(x, *weights, z, None), z))
        first = []
        for launch, z in launches:
            launch.run()
            first.append(z.clone())
        for shift in range(1, len(launches)):
            for number in range(3 * len(launches)):
                launches[number * shift % len(launches)][0].run()
        for (_, z), expected in zip(launches, first, strict=True):
            assert torch.equal(z, expected)
