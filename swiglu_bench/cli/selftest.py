"""The command `selftest`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from swiglu_bench import request
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.options import HOW, AuditOptions, Device, Impl, JsonForm, Seed, SkipImpl, Wait, option
from swiglu_bench.rows import text


def selftest(
    impl: Impl = None,
    skip_impl: SkipImpl = None,
    device: Device = None,
    seed: Seed = 0,
    wait: Wait = True,
    false_alarms: Annotated[
        int | None,
        option(HOW, "Random cases that must all pass; 0: none. \\[default: 50 on a GPU, 20 on a CPU]", min=0),
    ] = None,
    zoo: Annotated[bool, option(HOW, "Run the wrong implementations.")] = True,
    form: JsonForm = "table",
) -> None:
    """Test the suite itself: dozens of wrong or cheating implementations must be caught, and no correct one.

    Prints which check caught which. Exits 1 if a wrong one is not caught, or if a correct one fails at a random case.

    Example: swiglu-bench selftest --false-alarms 50 --skip-impl 'compile*'
    """
    text.check("--format", form, text.TABLE, "json")
    if not zoo and false_alarms == 0:
        raise BadInput("--no-zoo and --false-alarms 0 leave nothing to run; leave one of them out.")
    one = request.find_device(device, interpret=True)
    from swiglu_bench.tasks.selftest.run import run_selftest  # after Triton was told to interpret

    chosen = request.implementations_of(AuditOptions(impl=impl, skip_impl=skip_impl, in_process=True))
    count = false_alarms if false_alarms is not None else 50 if one.type == "cuda" else 20
    with request.held(one, wait):
        found = run_selftest(chosen, one, seed, count, zoo, text.screen(form))
    if form == "json":
        text.put(text.as_json({"kind": "selftest", **dataclasses.asdict(found)}))
    raise typer.Exit(request.INTERRUPTED if found.interrupted else int(not found.passed))
