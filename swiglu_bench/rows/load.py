"""What other programs did with the CPUs while a case was timed, and whether times can be relied on."""

from __future__ import annotations

from dataclasses import dataclass

MOST_SHARE = 0.1
"""Of the CPUs, that others may use while a CPU is timed, which itself uses all of them."""
HOST_CPUS = 2
"""That have to be free while a GPU is timed."""
MOST_STEAL = 0.02


@dataclass(frozen=True)
class Load:
    """Of the CPUs that this process may use."""

    cpus: int
    others: float
    """CPUs that other programs used, on average."""
    steal: float
    """Share of the time in which a virtual machine's host gave the CPUs to others."""

    def reason(self, device_type: str) -> str:
        """Why times of a device are not to be relied on, in one sentence, or ""."""
        most = MOST_SHARE * self.cpus if device_type == "cpu" else max(0.5 * self.cpus, self.cpus - HOST_CPUS)
        if self.others > most:
            return f"Other programs used {self.others:.1f} of {self.cpus} CPUs."
        if self.steal > MOST_STEAL:
            return f"The host of this virtual machine took its CPUs away for {self.steal:.0%} of the time."
        return ""
