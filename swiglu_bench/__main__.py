"""The program `swiglu-bench`, which is `python -m swiglu_bench`, too."""

from swiglu_bench.cli.ends import end


def main() -> None:
    """Run the command line."""
    end(_run)


def _run() -> int:
    from swiglu_bench.cli.app import run  # Ctrl-C may come already here

    return run()


if __name__ == "__main__":
    main()
