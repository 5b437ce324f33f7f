"""Launches that begin before the one ahead of them in the stream has ended: programmatic dependent launch.

What the launch itself takes, some microseconds, passes while the kernel ahead still runs, whoever launched that; the
programs then wait for its end and read and write nothing before. CUDA C++ Programming Guide, "Programmatic Dependent
Launch and Synchronization".
"""

from swiglu_kernels.launches.backend import INTERPRETING, tl, triton
from swiglu_kernels.launches.tiles import Capability


def starts_early(capability: Capability | None) -> bool:
    """Tell whether launches may: on compute capability 9.0, where it was measured; later ones have it as well."""
    return not INTERPRETING and capability == (9, 0)


@triton.jit
def wait_for_launch_ahead(EARLY: tl.constexpr):
    """Wait for the end of the launch ahead, where this one may begin before; it comes first in a kernel.

    The launch behind may begin as soon as all programs of this one have: it waits for their end as well.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
