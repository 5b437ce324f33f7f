"""The command `audit`."""

from __future__ import annotations

import typer

from swiglu_bench import request
from swiglu_bench.cases.cases import Precision, Scope, parse_dtypes
from swiglu_bench.cases.errors import BadInput
from swiglu_bench.options import AuditOptions, JsonForm
from swiglu_bench.rows import text
from swiglu_bench.tasks.sweep import start_forkserver


def audit(options: AuditOptions, form: JsonForm = "table") -> None:
    """Check every implementation against everything a user may want of it: the contract matrix.

    Sizes, strides, NaN, biases, autocast, compilation, graphs, huge tensors and more; each cell is pass, fail,
    unsupported or not run, with its reason. The exit status is 0 whatever the cells say, unless --strict is given.

    Example: swiglu-bench audit --impl 'eager,liger,fused*' --scope glu
    """
    text.check("--format", form, text.TABLE, "json")
    device = request.find_device(options.device, interpret=True)
    dtypes = parse_dtypes(options.dtype) if options.dtype is not None else [None]
    if len(dtypes) > 1:
        raise BadInput("--dtype: audit takes one, for the checks that have none of their own; give bf16, fp16 or fp32.")
    scopes = request.scopes_of(options.scope if options.scope is not None else ",".join(Scope))
    chosen = request.implementations_of(options)
    if not options.impl:
        chosen = [one for one in chosen if Precision.UNQUANTISED in one.precisions]
    if not options.in_process:
        start_forkserver("swiglu_bench.tasks.contract.matrix")
    from swiglu_bench.tasks.audit import Asked, run_audit  # after Triton was told to interpret

    status, about, cells = run_audit(chosen, Asked(scopes, dtypes[0]), device, options, text.screen(form))
    if form == "json":
        text.put(text.as_json({"kind": "audit", **about, "rows": [cell.row() for cell in cells]}))
    raise typer.Exit(status)
