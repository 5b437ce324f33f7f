"""Launches that begin before the one ahead of them in the stream has ended: programmatic dependent launch.

What the launch itself takes, some microseconds, passes while the kernel ahead still runs, whoever launched that; the
programs then wait for its end. Before that they write nothing, and read nothing that it may write: most nothing at all.
CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from swiglu_kernels.runtime.backend import INTERPRETING, Capability, tl, triton


def starts_early(capability: Capability | None) -> bool:
    """Tell whether launches may: on compute capability 9.0, where it was measured; later ones have it as well."""
    return not INTERPRETING and capability == (9, 0)


@triton.jit
def wait_for_launch_ahead(EARLY: tl.constexpr):
    """Wait for the end of the launch ahead, where this one may begin before.

    Only then may the launch behind begin: what is older than the launch ahead of it, it may read before it waits.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
