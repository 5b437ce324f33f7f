"""Where a program's buffers lie in shared memory, for loops in PTX, and their barriers, in Gluon.

PTX needs addresses, and Triton does not tell where in shared memory it puts a buffer. `locate` therefore marks buffers
with a pattern each, once for a program, and looks for them. It does so with two patterns one after the other: shared
memory is not cleared between kernels, and what an earlier one left there may hold any one pattern. A program that does
not find a buffer ends with a trap, which the launch explains (`lost`). An assertion that prints would be a call, and in
a kernel that has one ptxas serialises every wgmma: 2.89 ms where 1.77 are.
"""

from swiglu_kernels.hopper.loop import BLOCK
from swiglu_kernels.hopper.shared import GLUON_MISSING
from swiglu_kernels.runtime.backend import triton

FAR = 128 * 1024
"""Bytes between the two pieces of shared memory that a thread looks at: 128 threads cover 256 KB."""
RELEASES = 4
"""Arrivals that free a stage or hand over the turn: one of each warp."""


def lost(kernel: str) -> str:
    """Say what a kernel's trap means."""
    return (
        f"swiglu_kernels: {kernel} does not find its buffers in shared memory under Triton {triton.__version__}; "
        "SWIGLU_KERNELS_BY_HAND=off runs the portable kernels instead"
    )


if GLUON_MISSING is None:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier

    from swiglu_kernels.hopper.shared import synchronize, view

    _BLOCK, _RELEASES = gl.constexpr(BLOCK), gl.constexpr(RELEASES)
    _MARKS, _OTHER_MARKS = gl.constexpr(0x5AC3), gl.constexpr(0x35A6)  # of three buffers: these and the next two
    _PIECE, _PIECES = gl.constexpr(1024), gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))

    @gluon.constexpr_function
    def _look():
        """PTX that reads the first and the last word of a thread's two pieces of 1024 bytes."""
        lines = [
            "{",
            ".reg .pred inside;",
            ".reg .b32 at, end;",
            "mov.u32 at, global_smem;",
            "mov.u32 end, %dynamic_smem_size;",
            "add.u32 end, end, at;",
            "mad.lo.u32 at, $5, 1024, at;",
            "mov.u32 $0, at;",
        ]
        for number, step in enumerate((1020, FAR - 1020, 1020, 0), start=1):
            lines += [
                f"mov.u32 ${number}, 0;",
                "setp.lt.u32 inside, at, end;",
                f"@inside ld.shared.b32 ${number}, [at];",
                f"add.u32 at, at, {step};",
            ]
        return "\n".join([*lines, "}"])

    @gluon.jit
    def _mark(buffer, pattern: gl.constexpr):
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        piece = buffer.slice(0, 8, dim=0)
        piece.store(gl.full(piece.shape, pattern, gl.int16, LAYOUT).to(piece.dtype, bitcast=True))

    @gluon.jit
    def _pieces():
        """Return the address of each thread's first piece, and the first and last words of both."""
        PTX: gl.constexpr = _look()
        synchronize()
        seen = gl.inline_asm_elementwise(
            PTX,
            "=r,=r,=r,=r,=r,r,~{memory}",
            [gl.arange(0, 128, _PIECES)],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32, gl.int32),
            is_pure=False,
            pack=1,
        )
        synchronize()
        return seen

    @gluon.jit
    def _found(seen, again, COUNT: gl.constexpr):
        """The numbers of the pieces that held the COUNT marks, once of each pattern, 8 bits each; else a trap.

        All lanes have the same sum. `redux` tells ptxas, which moves what wgmma reads to uniform registers at each one
        where it does not know: Triton 3.8 adds up by shuffles.
        """
        piece = gl.arange(0, 128, _PIECES)
        mine = gl.zeros_like(piece)
        for number in gl.static_range(COUNT):
            mark = (_MARKS + number) * 0x10001
            other = (_OTHER_MARKS + number) * 0x10001
            near = (seen[1] == mark) & (seen[2] == mark) & (again[1] == other) & (again[2] == other)
            far = (seen[3] == mark) & (seen[4] == mark) & (again[3] == other) & (again[4] == other)
            at = gl.where(near, piece, piece + 128)
            mine += gl.where(near | far, (at << 8 * number) + (1 << 24), 0)  # above, how many were found
        return gl.inline_asm_elementwise(
            f"{{ .reg .pred lost; .reg .b32 count; shr.u32 count, $1, 24; setp.ne.u32 lost, count, {COUNT};"
            " @lost trap; redux.sync.or.b32 $0, $1, 0xffffffff; }",
            "=r,r", [gl.sum(mine, 0)], gl.int32, is_pure=False, pack=1,
        )  # fmt: skip

    @gluon.jit
    def _address(pieces, NUMBER: gl.constexpr):
        return gl.inline_asm_elementwise(
            "{ .reg .b32 begin; mov.u32 begin, global_smem; add.u32 $0, $1, begin; }",
            "=r,r", [(pieces >> 8 * NUMBER & 255) * _PIECE], gl.int32, is_pure=True, pack=1,
        )  # fmt: skip

    @gluon.jit
    def locate(buffer):
        """Return the address of a buffer of at least 8 rows of 128 bytes, whose contents are lost."""
        _mark(buffer, _MARKS)
        seen = _pieces()
        _mark(buffer, _OTHER_MARKS)
        found = _found(seen, _pieces(), 1)
        synchronize()  # Triton 3.6 may write what comes next where other warps still read the sum
        return _address(found, 0)

    @gluon.jit
    def _locate_all(left, right, barriers):
        """Return the addresses of three such buffers."""
        _mark(left, _MARKS)
        _mark(right, _MARKS + 1)
        _mark(barriers, _MARKS + 2)
        seen = _pieces()
        _mark(left, _OTHER_MARKS)
        _mark(right, _OTHER_MARKS + 1)
        _mark(barriers, _OTHER_MARKS + 2)
        found = _found(seen, _pieces(), 3)
        return _address(found, 0), _address(found, 1), _address(found, 2)

    @gluon.jit
    def set_up(
        left, right, STAGES: gl.constexpr, TURNS: gl.constexpr, ROWS: gl.constexpr = 8, COPIERS: gl.constexpr = 0
    ):
        """Allocate and initialise barriers; return the addresses of two rings and of the barriers, and the barriers.

        ROWS: of BLOCK elements, what is allocated for the barriers; SCALE_ROWS keep scales of blocks behind them.
        COPIERS: threads that fill a stage beside TMA.

        left, right: [buffers, rows, BLOCK] of at least 8 rows; the first buffer's contents are lost. Barriers: `full`
        of every stage, `empty` of every stage, and with TURNS `turn` of both consumers; without, each consumer reads
        every stage. The caller makes them visible, by a fence and a barrier of all warps.
        """
        RELEASES: gl.constexpr = _RELEASES if TURNS else 2 * _RELEASES
        place = gl.allocate_shared_memory(left.dtype, [ROWS, _BLOCK], left.layout)
        left_at, right_at, barriers_at = _locate_all(left.index(0), right.index(0), place)
        barriers = view(place, gl.int64, [ROWS * 16, 1], mbarrier.MBarrierLayout())  # more than there are
        for stage in gl.static_range(STAGES):
            mbarrier.init(barriers.index(stage), count=1 + COPIERS)
            mbarrier.init(barriers.index(STAGES + stage), count=RELEASES)
        if TURNS:
            for consumer in gl.static_range(2):
                mbarrier.init(barriers.index(2 * STAGES + consumer), count=RELEASES)
        return left_at, right_at, barriers_at, barriers
