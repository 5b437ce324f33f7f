"""The command `python -m swiglu_kernels.check`, and its processes."""

import argparse
import json
import sys
from pathlib import Path

import torch

from swiglu_kernels.check import check
from swiglu_kernels.hopper import admission


def main() -> None:
    """Check the kernels; exit status 0: all are admitted, 1: some are refused, 2: none can be checked here."""
    parser = argparse.ArgumentParser(
        prog="python -m swiglu_kernels.check",
        description="Admit the hand-scheduled kernels under this Triton, on this GPU: once, some two minutes.",
    )
    parser.add_argument("--device", default="cuda", help="a GPU of compute capability 9.0")
    parser.add_argument("--file", type=Path, help="keep the verdicts here, not in the user's cache folder")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each kernel")
    parser.add_argument("--run", choices=admission.KERNELS, help=argparse.SUPPRESS)
    parser.add_argument("--time", nargs="+", choices=admission.KERNELS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run or options.time:
        from swiglu_kernels.check import trial

        device = torch.device("cuda", torch.device(options.device).index or 0)
        for kernel in [options.run] if options.run else options.time:
            found = trial.run(kernel, device) if options.run else {"kernel": kernel} | trial.timed(kernel, device)
            print(json.dumps(found), flush=True)
        return
    try:
        verdicts = check(options.device, file=options.file, timeout_s=options.timeout)
    except RuntimeError as error:
        parser.error(str(error))
    sys.exit(any(verdicts.refused(kernel) for kernel in admission.KERNELS))


if __name__ == "__main__":
    main()
