"""Rows of tokens copied into a ring by the threads of a producer, in Gluon: Hopper's TMA has no gather.

A stage has 128 rows of 128 bytes, which are 1024 copies of 16 bytes (`cp.async`), eight of each of 128 threads: one
piece of every sixteenth row, whose places in x a thread keeps in registers. Pieces are put where TMA would put
them, swizzled over 128 bytes. The stage's barrier counts the threads: each arrives when its copies are there. Whoever
reads a stage with wgmma fences first (`loop.py`, `copied`).

Measured on an H100: NOTES.md. Instructions: PTX ISA 8.7, "cp.async" and "cp.async.mbarrier.arrive".
"""

from swiglu_kernels.hopper.shared import GLUON_MISSING

COPIERS = 128
"""Threads that copy."""
PIECE, PIECES, ROWS = 8, 8, 128
"""Elements of 16 bits that are copied at once; how many such a row of a stage has; rows of a stage."""

if GLUON_MISSING is None:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

    _COPIERS, _PIECES, _ROWS = (gl.constexpr(size) for size in (COPIERS, PIECES, ROWS))
    _LAYOUT = gl.constexpr(gl.BlockedLayout([1, 1], [32 // PIECES, PIECES], [COPIERS // 32, 1], [1, 0]))

    @gluon.jit
    def places(pair, token_pieces, ring_at, SLOTS: gl.constexpr):
        """Return how many pieces of x lie before each piece of a tile's rows, -1 for zeros, and where the first go.

        pair: pointer to the pairs of the rows. token_pieces: from a token of x to the next. ring_at: address of the
        first stage. SLOTS: of the routing.
        """
        rows = gl.arange(0, _ROWS, gl.SliceLayout(1, _LAYOUT))
        pieces = gl.arange(0, _PIECES, gl.SliceLayout(0, _LAYOUT))
        pairs = gl.load(pair + rows)
        before = (pairs // SLOTS * token_pieces)[:, None] + pieces[None, :]
        before = gl.where((pairs >= 0)[:, None], before, -1)
        first = rows % (_COPIERS // _PIECES)  # of a thread's rows
        return before, ring_at + (first * 128)[:, None] + ((first % 8)[:, None] ^ pieces[None, :]) * 16

    @gluon.constexpr_function
    def _copies_of(count, step):
        """PTX of a thread that copies `count` pieces of 16 bytes of a stage, whose rows are `step` apart.

        Operands: results, then as many of each: how many pieces lie before it, or -1 for zeros; where the first goes;
        the stage's barrier; from where.
        """
        before, to, barrier, source = (count * number for number in range(1, 5))
        lines = ["{", ".reg .b32 number, size;", ".reg .b64 at;", ".reg .pred some;"]
        for number in range(count):
            lines += [
                f"setp.ge.s32 some, ${before + number}, 0;",
                "selp.u32 size, 16, 0, some;",
                f"max.s32 number, ${before + number}, 0;",
                f"mad.wide.u32 at, number, 16, ${source};",
                f"cp.async.cg.shared.global [${to}+{128 * step * number}], [at], 16, size;",
            ]
        lines.append(f"cp.async.mbarrier.arrive.noinc.shared::cta.b64 [${barrier}];")
        return "\n".join([*lines, *(f"mov.b32 ${number}, 0;" for number in range(count)), "}"])

    @gluon.constexpr_function
    def _copy_operands(count):
        return ",".join(["=r"] * count + ["r"] * (3 * count) + ["l"] * count + ["~{memory}"])

    @gluon.jit
    def copy_rows(before, to, barrier, source):
        """Begin to copy a stage's rows of tokens; its barrier is told when they are there.

        before, to: see `places`, `to` with the stage's own address. barrier: its address. source: of the depth.
        """
        COUNT: gl.constexpr = _ROWS * _PIECES // _COPIERS
        PTX: gl.constexpr = _copies_of(COUNT, _COPIERS // _PIECES)
        OPERANDS: gl.constexpr = _copy_operands(COUNT)
        gl.inline_asm_elementwise(
            PTX,
            OPERANDS,
            [
                before,
                to,
                gl.full(before.shape, barrier, gl.int32, _LAYOUT),
                gl.full(before.shape, source.to(gl.int64, bitcast=True), gl.int64, _LAYOUT),
            ],
            gl.int32,
            is_pure=False,
            pack=COUNT,
        )
