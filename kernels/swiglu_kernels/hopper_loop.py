"""The main loop of a Hopper consumer in PTX: accumulators of up to 128 x 192, which Triton cannot have.

A warpgroup's registers hold 128 x 192, but sizes of Triton's tensors are powers of two. With two accumulators, of 128
and of 64 columns, wgmma reads the left operand from shared memory twice. Written in PTX, one wgmma has all 192
columns, and the result is handed over as tensors of 64 x 64, whose registers are those of the accumulator. The loop
takes turns, waits for stages and frees them itself, by one lane of each warp; Triton would put a barrier of all warps
around each.

PTX needs addresses, and Triton does not tell where in shared memory it puts a buffer. `locate` therefore marks buffers
with a pattern each, once for a program, and looks for them.

Measured on an H200: NOTES.md. Descriptors and wgmma: PTX ISA 8.7, "Asynchronous Warpgroup Level Matrix Instructions".
"""

from swiglu_kernels.hopper import GLUON_MISSING

BLOCK = 64
"""Rows and columns of what the accumulator is handed over in; also the depth of a stage, 128 bytes."""
ROWS, COLUMNS = 2 * BLOCK, 3 * BLOCK
RELEASES = 4
"""Arrivals that free a stage or hand over the turn: one of each warp."""

if GLUON_MISSING is None:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

    from swiglu_kernels.hopper import synchronize

    _BLOCK = gl.constexpr(BLOCK)
    _LEFT_MARK, _RIGHT_MARK, _BARRIERS_MARK = gl.constexpr(0x5AC3), gl.constexpr(0x5AC4), gl.constexpr(0x5AC5)

    @gluon.constexpr_function
    def _main_loop(columns, stages, me, kind):
        """PTX of one tile's main loop; operands: 192 accumulator registers, then 32 copies of each number."""
        registers = 96  # of a thread, for 64 rows of the accumulator
        row_bytes = 128
        leading = 1 << 16  # of a descriptor; not used in this layout, and by custom one
        left, right, barriers, step, depth_tiles, parity = (f"${2 * registers + 32 * number}" for number in range(6))
        full, empty, turn = 0, 8 * stages, 16 * stages  # where the barriers are
        lines = [
            "{",
            ".reg .pred again, passed, leader, freed, add;",
            ".reg .b32 stage, phase, depth, barrier, before, low_a, low_b, high, at;",
            ".reg .b64 a, b;",
            "elect.sync at|leader, 0xffffffff;",
            "setp.eq.u32 add, 0, 0;",
            *(f"mov.b32 ${number}, 0;" for number in range(2 * registers)),
            f"rem.u32 stage, {step}, {stages};",
            f"div.u32 phase, {step}, {stages};",
            "and.b32 phase, phase, 1;",
            "mov.u32 depth, 0;",
            "mov.u32 before, 0;",
            "mov.u32 high, 0x40000040;",  # swizzled over 128 bytes, 1024 bytes from 8 rows to the next 8
            f"TURN: mbarrier.try_wait.parity.shared::cta.b64 passed, [{barriers}+{turn + 8 * me}], {parity};",
            "@!passed bra.uni TURN;",  # a branch that is not uniform would cost the producer its uniform registers
            "NEXT:",
            f"mad.lo.u32 barrier, stage, 8, {barriers};",
            f"FULL: mbarrier.try_wait.parity.shared::cta.b64 passed, [barrier+{full}], phase;",
            "@!passed bra.uni FULL;",
            f"mad.lo.u32 low_a, stage, {128 * row_bytes}, {left};",
            f"mad.lo.u32 low_b, stage, {192 * row_bytes}, {right};",
            "shr.u32 low_a, low_a, 4;",
            "shr.u32 low_b, low_b, 4;",
            "wgmma.fence.sync.aligned;",
        ]
        for chunk in range(4):  # of 16 along the depth
            lines += [f"add.u32 at, low_b, {leading + 32 * chunk // 16};", "mov.b64 b, {at, high};"]
            for half in range(2):
                accumulator = ", ".join(f"${registers * half + number}" for number in range(columns // 2))
                lines += [
                    f"add.u32 at, low_a, {leading + (64 * half * row_bytes + 32 * chunk) // 16};",
                    "mov.b64 a, {at, high};",
                    f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "
                    f"{{{accumulator}}}, a, b, add, 1, 1, 0, 0;",
                ]
        lines += [
            "wgmma.commit_group.sync.aligned;",
            "wgmma.wait_group.sync.aligned 1;",  # the stage before is done
            "setp.ne.and.u32 freed, depth, 0, leader;",
            f"@freed mbarrier.arrive.shared::cta.b64 _, [before+{empty}];",
            "mov.u32 before, barrier;",
            "add.u32 stage, stage, 1;",
            f"setp.eq.u32 again, stage, {stages};",
            "@again mov.u32 stage, 0;",
            "@again xor.b32 phase, phase, 1;",
            "add.u32 depth, depth, 1;",
            f"setp.lt.u32 again, depth, {depth_tiles};",
            "@again bra.uni NEXT;",
            f"@leader mbarrier.arrive.shared::cta.b64 _, [{barriers}+{turn + 8 * (1 - me)}];",
            "wgmma.wait_group.sync.aligned 0;",
            f"@leader mbarrier.arrive.shared::cta.b64 _, [before+{empty}];",
            "}",
        ]
        return "\n".join(lines)

    _OPERANDS = gl.constexpr(",".join(["=f"] * 192 + ["r"] * 192 + ["~{memory}"]))

    @gluon.jit
    def multiply(
        left, right, barriers, step, depth_tiles, parity,
        dtype: gl.constexpr, COLUMNS: gl.constexpr, ME: gl.constexpr, STAGES: gl.constexpr,
    ):  # fmt: skip
        """Run the main loop of one tile, when it is this consumer's turn, and hand the turn over.

        left, right: addresses of STAGES tiles of ROWS x BLOCK and of 3 BLOCK x BLOCK, of which COLUMNS rows are used.
        barriers: address of `full` of every stage, `empty` of every stage, and `turn` of both consumers. step: stages
        that were used before. parity: of the turn that is awaited.

        Returns six tensors of BLOCK x BLOCK in fp32, the upper three from left to right and then the lower ones;
        what is right of COLUMNS is zero.
        """
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _BLOCK, 16])
        LOOP: gl.constexpr = _main_loop(COLUMNS, STAGES, ME, "f16" if dtype == gl.float16 else "bf16")
        return gl.inline_asm_elementwise(
            LOOP,
            _OPERANDS,
            [
                gl.full([_BLOCK, _BLOCK], left, gl.int32, LAYOUT),
                gl.full([_BLOCK, _BLOCK], right, gl.int32, LAYOUT),
                gl.full([_BLOCK, _BLOCK], barriers, gl.int32, LAYOUT),
                gl.full([_BLOCK, _BLOCK], step, gl.int32, LAYOUT),
                gl.full([_BLOCK, _BLOCK], depth_tiles, gl.int32, LAYOUT),
                gl.full([_BLOCK, _BLOCK], parity, gl.int32, LAYOUT),
            ],
            dtype=(gl.float32, gl.float32, gl.float32, gl.float32, gl.float32, gl.float32),
            is_pure=False,
            pack=32,
        )

    @gluon.constexpr_function
    def _search(marks):
        """PTX that looks at two of 256 places, 1024 bytes apart; operands: an address a mark, the thread's number."""
        lines = [
            "{",
            ".reg .pred marked;",
            ".reg .b32 at, end, first, last;",
            "mov.u32 at, global_smem;",
            "mov.u32 end, %dynamic_smem_size;",
            "add.u32 end, end, at;",
            f"mad.lo.u32 at, ${len(marks)}, 1024, at;",
            *(f"mov.u32 ${number}, 0x7fffffff;" for number in range(len(marks))),
        ]
        for _ in range(2):
            lines += [
                "mov.u32 first, 0;",
                "mov.u32 last, 1;",
                "setp.lt.u32 marked, at, end;",
                "@marked ld.shared.b32 first, [at];",
                "add.u32 at, at, 1020;",
                "setp.lt.u32 marked, at, end;",
                "@marked ld.shared.b32 last, [at];",
                "sub.u32 at, at, 1020;",
            ]
            for number, mark in enumerate(marks):
                lines += [
                    f"setp.eq.u32 marked, first, {mark << 16 | mark};",
                    "setp.eq.and.u32 marked, first, last, marked;",
                    f"@marked mov.u32 ${number}, at;",
                ]
            lines.append(f"add.u32 at, at, {128 * 1024};")
        return "\n".join([*lines, "}"])

    @gluon.jit
    def _mark(buffer, pattern: gl.constexpr):
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        buffer.store(gl.full(buffer.shape, pattern, gl.int16, LAYOUT).to(buffer.dtype, bitcast=True))

    @gluon.jit
    def locate(left, right, barriers):
        """Return the addresses of three buffers of at least 8 rows of 128 bytes, whose contents are lost."""
        _mark(left, _LEFT_MARK)
        _mark(right, _RIGHT_MARK)
        _mark(barriers, _BARRIERS_MARK)
        synchronize()
        PTX: gl.constexpr = _search([_LEFT_MARK, _RIGHT_MARK, _BARRIERS_MARK])
        thread = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
        left_at, right_at, barriers_at = gl.inline_asm_elementwise(
            PTX, "=r,=r,=r,r,~{memory}", [thread], dtype=(gl.int32, gl.int32, gl.int32), is_pure=False, pack=1
        )
        return gl.min(left_at, 0), gl.min(right_at, 0), gl.min(barriers_at, 0)
