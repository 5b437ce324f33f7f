"""Rows of tokens copied into a ring by the threads of four producers, in Gluon: Hopper's TMA has no gather.

    pairs_of            the pairs of a tile's rows, which are the same in each of its stages
    ask, answer         those of a stage's rows where every stage has others
    places, copy_rows   where these rows lie in x, and their copies

A stage has 128 rows of one block of 64 columns, or 64 rows of two or three blocks side by side. A row of a block has
128 bytes: eight pieces of 16 bytes, which as many threads copy (`cp.async`). Each producer is one warp, and copies 4 of
every 16 rows by itself: producers that waited for each other would take longer. Pieces are put where TMA would put
them, swizzled over 128 bytes. The stage's barrier counts the threads: each arrives when its copies are there. Whoever
reads a stage with wgmma fences first (`loop.py`, `copied`).

A thread that loads a pair waits for all copies that it began before. So pairs of other rows are copied as well, into
slots of shared memory that are filled AHEAD stages before, and read one stage before they are needed.

Measured on an H100: NOTES.md. Instructions: PTX ISA 8.7, "cp.async" and "cp.async.mbarrier.arrive".
"""

import itertools

from swiglu_kernels.hopper.shared import GLUON_MISSING

COPIERS = 128
"""Threads that copy."""
PIECE, PIECES = 8, 8
"""Elements of 16 bits that are copied at once; how many such a row of a block has."""
OTHER_ROWS = 64
"""Of a stage, where every stage has others."""
TOGETHER = 4
"""Rows whose addresses are found before any of them is copied."""
AHEAD = 3
"""Slots of pairs, each of a stage's OTHER_ROWS."""
SLOT_BYTES = 4 * OTHER_ROWS

if GLUON_MISSING is None:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

    _PIECES, _STEP, _OTHER_ROWS = (gl.constexpr(size) for size in (PIECES, COPIERS // PIECES, OTHER_ROWS))
    _LAYOUT = gl.constexpr(gl.BlockedLayout([1, 1], [32 // PIECES, PIECES], [1, 1], [1, 0]))
    _ROW_LAYOUT, _PIECE_LAYOUT = gl.constexpr(gl.SliceLayout(1, _LAYOUT)), gl.constexpr(gl.SliceLayout(0, _LAYOUT))

    @gluon.jit
    def _rows_of(ROWS: gl.constexpr, WARP: gl.constexpr):
        """Return the rows of a stage that a producer copies, [ROWS / 4, 1]: of a thread every sixteenth."""
        number = gl.arange(0, ROWS // 4, _ROW_LAYOUT)
        return (number // 4 * _STEP + WARP * 4 + number % 4)[:, None]

    @gluon.jit
    def _pieces():
        return gl.arange(0, _PIECES, _PIECE_LAYOUT)[None, :]

    @gluon.jit
    def first_place(ring_at, ROWS: gl.constexpr, WARP: gl.constexpr):
        """Return where a thread's first piece goes in the first stage, which begins at an address of shared memory."""
        first = _rows_of(ROWS, WARP) % _STEP
        return ring_at + first * 128 + (first % 8 ^ _pieces()) * 16

    @gluon.jit
    def pairs_of(pair, ROWS: gl.constexpr, WARP: gl.constexpr):
        """Return the pairs of a producer's rows; pair: pointer to that of the first row."""
        return gl.load(pair + _rows_of(ROWS, WARP))

    @gluon.jit
    def places(pairs, token_pieces, SLOTS: gl.constexpr):
        """Return how many pieces of x lie before each piece of these pairs' tokens, -1 for zeros.

        token_pieces: from a token of x to the next. SLOTS: of the routing.
        """
        return gl.where(pairs >= 0, pairs // SLOTS * token_pieces + _pieces(), -1)

    @gluon.constexpr_function
    def _copies_of(count, blocks, last):
        """PTX of a thread that copies its piece of `count` rows, of each of `blocks` side by side, or zeros.

        Operands: results, then as many of each: how many pieces lie before it, or -1 for zeros; where the first goes;
        the stage's barrier; from where. A register that a copy still has to read is not free for the next one's
        address, so a few are found together.
        """
        before, to, barrier, source = (count * number for number in range(1, 5))
        lines = ["{", ".reg .b32 number, size<8>;", ".reg .b64 at<8>;", ".reg .pred some;"]
        for first in range(0, count, TOGETHER):
            numbers = range(first, min(first + TOGETHER, count))
            for number in numbers:
                lines += [
                    f"setp.ge.s32 some, ${before + number}, 0;",
                    f"selp.u32 size{number}, 16, 0, some;",
                    f"max.s32 number, ${before + number}, 0;",
                    f"mad.wide.u32 at{number}, number, 16, ${source};",
                ]
            for number, block in itertools.product(numbers, range(blocks)):
                place = 128 * (COPIERS // PIECES * number + OTHER_ROWS * block)
                lines.append(
                    f"cp.async.cg.shared.global [${to}+{place}], [at{number}+{128 * block}], 16, size{number};"
                )
        if last:
            lines.append(f"cp.async.mbarrier.arrive.noinc.shared::cta.b64 [${barrier}];")
        return "\n".join([*lines, *(f"mov.b32 ${number}, 0;" for number in range(count)), "}"])

    @gluon.constexpr_function
    def _copy_operands(count):
        return ",".join(["=r"] * count + ["r"] * (3 * count) + ["l"] * count + ["~{memory}"])

    @gluon.jit
    def copy_rows(before, to, barrier, source, BLOCKS: gl.constexpr, LAST: gl.constexpr):
        """Begin to copy a producer's rows of a stage; behind the LAST the stage's barrier is told when all are there.

        before: see `places`. to: see `first_place`, with the stage's own address. barrier: its address. source: of the
        depth or of the columns. BLOCKS: that a stage has side by side.
        """
        COUNT: gl.constexpr = before.shape[0] * _PIECES // 32
        PTX: gl.constexpr = _copies_of(COUNT, BLOCKS, LAST)
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

    @gluon.jit
    def ask(slot_at, pair, left, WARP: gl.constexpr):
        """Begin to copy the pairs of a producer's rows of a stage into its part of a slot.

        slot_at: the slot's address. pair: pointer to the pair of the stage's first row. left: rows that there are;
        behind them pairs are -1.

        A part has the pairs of each thread's four rows side by side. The first half of the warp asks.
        """
        number = (gl.arange(0, 4, _ROW_LAYOUT)[:, None] * _PIECES + _pieces()) % 16
        row = number % 4 * _STEP + WARP * 4 + number // 4
        gl.inline_asm_elementwise(
            "{ .reg .pred inside, behind, first; .reg .b32 lane; mov.u32 lane, %laneid; setp.lt.u32 first, lane, 16;"
            " setp.lt.and.s32 inside|behind, $3, $4, first; @inside cp.async.ca.shared.global [$1], [$2], 4;"
            " @behind st.shared.b32 [$1], -1; cp.async.commit_group; mov.b32 $0, 0; }",
            "=r,r,l,r,r,~{memory}",
            [
                slot_at + WARP * 64 + number * 4,
                (pair + row).to(gl.int64, bitcast=True),
                row,
                gl.full(row.shape, left, gl.int32, _LAYOUT),
            ],
            gl.int32,
            is_pure=False,
            pack=1,
        )

    @gluon.constexpr_function
    def _answer():
        return "\n".join(
            [
                f"cp.async.wait_group {AHEAD - 1};",
                "bar.warp.sync 0xffffffff;",  # all lanes have theirs
                "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
                "bar.warp.sync 0xffffffff;",  # and have read them
            ]
        )

    @gluon.jit
    def answer(slot_at, WARP: gl.constexpr):
        """Return the pairs that the first of the last AHEAD calls of `ask` was for, as `pairs_of` does."""
        PTX: gl.constexpr = _answer()
        mine = slot_at + WARP * 64 + _rows_of(_OTHER_ROWS, WARP) % 4 * 16 + _pieces() * 0
        return gl.inline_asm_elementwise(PTX, "=r,=r,=r,=r,r,r,r,r,~{memory}", [mine], gl.int32, is_pure=False, pack=4)
