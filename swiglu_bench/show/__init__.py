"""Where records go: the terminal, CSV files, Weights & Biases. Writers read Records and nothing else."""

from typing import Protocol

from swiglu_bench.rows.record import Record


class Writer(Protocol):
    """Takes records one by one, as they arise; `contextlib.closing(writer)` closes it however the run ends."""

    def write(self, record: Record) -> None:
        """Take one record; what it says is kept at once, and a failure to keep it never ends the run."""

    def close(self) -> None:
        """Finish what has begun; also called after Ctrl-C, and harmless when called twice."""
