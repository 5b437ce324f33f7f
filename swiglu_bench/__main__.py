"""`python -m swiglu_bench` is `swiglu-bench`."""

from swiglu_bench.cli.app import main

if __name__ == "__main__":
    main()
