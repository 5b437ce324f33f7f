"""Main loops of Hopper consumers in PTX: for accumulators that Triton cannot have, of up to 128 x 192 or 64 x 2 x 128.

A warpgroup's registers hold 128 x 192, but sizes of Triton's tensors are powers of two. With two accumulators, of 128
and of 64 columns, wgmma reads the left operand from shared memory twice. Written in PTX, one wgmma has all 192
columns, and the result is handed over as tensors of 64 x 64, whose registers are those of the accumulator. The loop
takes turns, waits for stages and frees them itself, by one lane of each warp; Triton would put a barrier of all warps
around each.

PTX needs addresses: `buffers.py` finds them.

Measured on an H200: NOTES.md. Descriptors and wgmma: PTX ISA 8.7, "Asynchronous Warpgroup Level Matrix Instructions".
"""

from swiglu_kernels.hopper.shared import GLUON_MISSING

BLOCK = 64
"""Rows and columns of what the accumulator is handed over in; also the depth of a stage, 128 bytes."""
ROW_BYTES = 128
"""Of a stage."""
BARRIER_BYTES = 128
"""What all barriers take at most."""
ROW_SCALES, SCALE_BYTES = 528, 1296
"""Of a stage's scales: what those of rows take, 128 of them and up to four before or behind; and all of them."""
SCALE_ROWS = 64
"""Rows of BLOCK elements that hold the barriers and, behind them, the scales of up to six stages."""
FIRST_ORDER = 14
"""Of two named barriers of hardware, one for each consumer; Triton uses those from 0 on."""

if GLUON_MISSING is None:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

    _BLOCK, _BARRIER_BYTES, _SCALE_BYTES = (gl.constexpr(size) for size in (BLOCK, BARRIER_BYTES, SCALE_BYTES))
    BLOCK_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16]))

    @gluon.constexpr_function
    def _held(columns):
        """Which registers of three blocks hold a wgmma's columns, and how many of the third block's are copies.

        What is beyond 128 columns are equal shares of two products, whose last 32 columns are put into the halves of
        the third block; some of them are in the first two as well.
        """
        rest = max(columns - 128, 0) // 4  # registers for what each product has in the third block alone
        numbers = [*range(min(columns // 2, 64)), *range(80 - rest, 80), *range(96 - rest, 96)]
        return numbers, 16 - rest if rest else 0

    @gluon.constexpr_function
    def _main_loop(
        left_rows, right_rows, left_row, left_step, right_step, columns, registers, stages, turn_of, kind,
        left_across=False, right_across=False, copied=False, sides=False,
    ):  # fmt: skip
        """PTX of one tile's main loop: two wgmmas of 64 x columns, each with half of the accumulator's registers.

        Operands: these registers, then 32 copies of each number.

        left_rows, right_rows: of a stage.
        left_row: the first that is used.
        left_step, right_step: rows from the first wgmma's to the second's.
        columns: of a wgmma, see `_held`.
        turn_of: the consumer, where two of them take turns; -1 where each reads every stage.
        left_across, right_across: the depth is not the contiguous axis: a stage has blocks of [depth, 64] side by side.
        copied: threads copied a part of the stages, which wgmma would not see otherwise.
        sides: there is a last number; if it is not 0, left lies across if right else does, and right if left does.
        """
        operands = [f"${registers + 32 * number}" for number in range(7)]
        left, right, barriers, step, depth_tiles, parity, changed = operands
        empty, turn = 8 * stages, 16 * stages  # where the barriers are; those of full stages come first
        numbers, again = _held(columns)
        wgmmas = tuple(
            (
                ", ".join(f"${registers // 2 * half + number}" for number in numbers),
                (left_row + left_step * half) * ROW_BYTES, right_step * half * ROW_BYTES,
            )
            for half in range(2)
        )  # fmt: skip
        bytes_of = left_rows * ROW_BYTES, right_rows * ROW_BYTES
        lines = [
            "{",
            ".reg .pred again, passed, leader, freed, add;",
            ".reg .b32 stage, phase, depth, barrier, before, low_a, low_b, high, at;",
            ".reg .b64 a, b;",
            "elect.sync at|leader, 0xffffffff;",
            "setp.eq.u32 add, 0, 0;",
            *(f"mov.b32 ${number}, 0;" for number in range(registers)),
            f"rem.u32 stage, {step}, {stages};",
            f"div.u32 phase, {step}, {stages};",
            "and.b32 phase, phase, 1;",
            "mov.u32 depth, 0;",
            "mov.u32 before, 0;",
            "mov.u32 high, 0x40000040;",  # swizzled over 128 bytes, 1024 bytes from 8 rows to the next 8
        ]
        end = ["wgmma.wait_group.sync.aligned 0;", f"@leader mbarrier.arrive.shared::cta.b64 _, [before+{empty}];"]
        if turn_of >= 0:
            lines += [
                f"TURN: mbarrier.try_wait.parity.shared::cta.b64 passed, [{barriers}+{turn + 8 * turn_of}], {parity};",
                "@!passed bra.uni TURN;",  # a branch that is not uniform would cost the producer its uniform registers
            ]
            end.insert(0, f"@leader mbarrier.arrive.shared::cta.b64 _, [{barriers}+{turn + 8 * (1 - turn_of)}];")
        ways = [("", left_across, right_across)]
        if sides and left_across != right_across:
            lines += [f"setp.ne.u32 again, {changed}, 0;", "@again bra.uni OTHER_NEXT;"]
            ways.append(("OTHER_", right_across, left_across))
        for name, *across in ways:  # each to its end: ptxas serialises multiplications that two ways have begun (C7514)
            if name:
                lines.append("bra.uni DONE;")
            lines += [
                f"{name}NEXT:",
                *_full_stage(barriers, left, bytes_of[0], right, bytes_of[1], copied, name),
                *_multiply(wgmmas, columns, kind, *across),
                "wgmma.commit_group.sync.aligned;",
                "wgmma.wait_group.sync.aligned 1;",  # the stage before is done
                "setp.ne.and.u32 freed, depth, 0, leader;",
                f"@freed mbarrier.arrive.shared::cta.b64 _, [before+{empty}];",
                "mov.u32 before, barrier;",
                *_next_stage(stages, depth_tiles, name),
                *end,
            ]
        return "\n".join([*lines, "DONE:", *_copied(again, range(0, registers, registers // 2)), "}"])

    @gluon.constexpr_function
    def _multiply(wgmmas, columns, kind, left_across, right_across):
        """PTX of a stage's wgmmas: of each its registers, and where it begins in left and right, in bytes."""
        # Bytes / 16 from 64 columns to the next 64, for operands that lie across; 1 by custom where it is not used.
        left_leading, right_leading = 1 << 16, (512 if right_across else 1) << 16
        left_chunk, right_chunk = (16 * ROW_BYTES if across else 32 for across in (left_across, right_across))
        lines = ["wgmma.fence.sync.aligned;"]
        for chunk in range(4):  # of 16 along the depth
            for accumulator, at_a, at_b in wgmmas:
                lines += [
                    f"add.u32 at, low_a, {left_leading + (at_a + left_chunk * chunk) // 16};",
                    "mov.b64 a, {at, high};",
                    f"add.u32 at, low_b, {right_leading + (at_b + right_chunk * chunk) // 16};",
                    "mov.b64 b, {at, high};",
                    f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "
                    f"{{{accumulator}}}, a, b, add, 1, 1, {int(left_across)}, {int(right_across)};",
                ]
        return lines

    @gluon.constexpr_function
    def _full_stage(barriers, left, left_bytes, right, right_bytes, copied=False, name=""):
        """PTX that waits until `stage` is full, and finds both operands of it, in units of 16 bytes."""
        return [
            f"mad.lo.u32 barrier, stage, 8, {barriers};",
            f"{name}FULL: mbarrier.try_wait.parity.shared::cta.b64 passed, [barrier], phase;",
            f"@!passed bra.uni {name}FULL;",
            *(["fence.proxy.async.shared::cta;"] if copied else []),
            f"mad.lo.u32 low_a, stage, {left_bytes}, {left};",
            f"mad.lo.u32 low_b, stage, {right_bytes}, {right};",
            "shr.u32 low_a, low_a, 4;",
            "shr.u32 low_b, low_b, 4;",
        ]

    @gluon.constexpr_function
    def _next_stage(stages, depth_tiles, name=""):
        """PTX that goes on with the next stage, if there is one."""
        return [
            "add.u32 stage, stage, 1;",
            f"setp.eq.u32 again, stage, {stages};",
            "@again mov.u32 stage, 0;",
            "@again xor.b32 phase, phase, 1;",
            "add.u32 depth, depth, 1;",
            f"setp.lt.u32 again, depth, {depth_tiles};",
            f"@again bra.uni {name}NEXT;",
        ]

    @gluon.constexpr_function
    def _copied(again, firsts):
        """PTX that fills what the third block has of the first two; `firsts` are the first registers of each three."""
        return [
            f"mov.b32 ${first + 64 + 16 * product + number}, ${first + 32 * (product + 1) - again + number};"
            for first in firsts for number in range(again) for product in range(2)
        ]  # fmt: skip

    @gluon.constexpr_function
    def _pieces_of(columns):
        """How many pieces of a tile's gate, and of up, have one scale for each row: 32 columns, or a block of 128."""
        return 1 if columns == 256 else columns // 64

    @gluon.constexpr_function
    def _first_scales(half, barriers, my_row, row, column, columns):
        """PTX that finds where in a stage's scales those of this thread's rows and columns are.

        The lane is read here and the row is an operand: in a loop that needs %tid.x, ptxas keeps what wgmma reads in
        registers of each thread, and moves it before each wgmma.
        """
        found = [
            ".reg .b32 mine, here, first;",
            ".reg .f32 of_row<2>, of_weight<4>, both<12>, chosen;",
            ".reg .pred beyond<3>;",
            f"and.b32 mine, {row}, 3;",  # the copy begins at a multiple of 16 bytes
            f"add.u32 mine, mine, {my_row};",
            f"mad.lo.u32 mine, mine, 4, {barriers};",
            f"add.u32 mine, mine, {BARRIER_BYTES + 4 * BLOCK * half};",
            f"add.u32 here, {barriers}, {BARRIER_BYTES + ROW_SCALES};",
            f"shr.u32 first, {column}, 7;",
        ]
        for piece in range(_pieces_of(columns)):
            found += [
                f"add.u32 at, {column}, {32 * piece};",
                "shr.u32 at, at, 7;",
                f"setp.ne.u32 beyond{piece}, at, first;",
            ]
        return found

    @gluon.constexpr_function
    def _factors(columns):
        """PTX that multiplies a stage's scales: for each piece of gate and of up, and both rows of a thread."""
        found = [
            f"mad.lo.u32 at, stage, {SCALE_BYTES}, mine;",
            *(f"ld.shared.f32 of_row{half}, [at+{32 * half}];" for half in range(2)),
            f"mad.lo.u32 at, stage, {SCALE_BYTES}, here;",
            "and.b32 first, depth, 3;",
            "mad.lo.u32 at, first, 4, at;",
            *(f"ld.shared.f32 of_weight{number}, [at+{16 * number}];" for number in range(4)),
        ]
        for piece in range(_pieces_of(columns)):
            for product in range(2):
                found += [
                    f"selp.f32 chosen, of_weight{product + 2}, of_weight{product}, beyond{piece};",
                    *(f"mul.f32 both{4 * piece + 2 * product + half}, of_row{half}, chosen;" for half in range(2)),
                ]
        return found

    @gluon.constexpr_function
    def _promoting_loop(columns, half, stages, blocks, ordered):
        """PTX of one tile's main loop in e4m3, for 64 rows: a sum over each stage's 128 of depth, added in fp32.

        Operands: 96 registers (128 where `columns` are 256), then 32 copies of: left, right, barriers, stage, phase,
        depth tiles; for blocks also which of the 64 rows is this thread's, and the first row and column of these.

        columns: of a wgmma, see `_held`; for blocks 128 or 192. 256 are one of 128 after the other, whose sums go
            through the same registers: gate, then up.
        half: of a stage's rows, which is used.
        blocks: scales are those of 1 x 128 elements of left and of 128 x 128 of both weights, and come with the stages,
            see `load_scales`. Those of rows are left to the epilogue.
        ordered: the two consumers begin to multiply in turn, so that they do not add at the same time.
        """
        row_bytes, empty = 128, 8 * stages
        in_turn = columns == 256
        numbers, again = _held(columns)
        thirds = ((0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1))  # what 16 registers are: 32 columns of a product
        registers, turns = (128, [range(64), range(64, 128)]) if in_turn else (96, [numbers])
        operands = (f"${registers + 32 * number}" for number in range(9))
        left, right, barriers, first_stage, first_phase, depth_tiles, *where = operands
        part = ", ".join(f"part{number}" for number in range(len(turns[0])))
        freed = f"@leader mbarrier.arrive.shared::cta.b64 _, [barrier+{empty}];"
        lines = [
            "{",
            ".reg .pred again, passed, leader, add, ordered;",
            ".reg .b32 stage, phase, depth, barrier, low_a, low_b, high, at;",
            ".reg .b64 a, b;",
            f".reg .f32 part<{len(turns[0])}>;",
            "elect.sync at|leader, 0xffffffff;",
            *(f"mov.b32 ${number}, 0;" for number in range(registers)),
            f"mov.u32 stage, {first_stage};",
            f"mov.u32 phase, {first_phase};",
            "mov.u32 depth, 0;",
            "mov.u32 high, 0x40000040;",  # swizzled over 128 bytes, 1024 bytes from 8 rows to the next 8
            *(_first_scales(half, barriers, *where, columns) if blocks else []),
            "NEXT:",
            *_full_stage(barriers, left, 2 * BLOCK * row_bytes, right, (4 if in_turn else 3) * BLOCK * row_bytes),
        ]
        for turn, numbers in enumerate(turns):
            awaited, told = f"bar.sync {FIRST_ORDER + half}, 256;", f"bar.arrive {FIRST_ORDER + 1 - half}, 256;"
            # Neither the first multiplication of a tile awaits another, nor does one await the last.
            if half == 0 and turn == 0:
                awaited = f"setp.ne.u32 ordered, depth, 0; @ordered {awaited}"
            if half == 1 and turn == len(turns) - 1:
                told = f"add.u32 at, depth, 1; setp.ne.u32 ordered, at, {depth_tiles}; @ordered {told}"
            lines += [*([awaited] if ordered else []), "wgmma.fence.sync.aligned;"]
            for chunk in range(4):  # of 32 along the depth
                lines += [
                    f"setp.ne.u32 add, {chunk}, 0;",
                    f"add.u32 at, low_a, {(1 << 16) + half * BLOCK * row_bytes // 16 + 2 * chunk};",
                    "mov.b64 a, {at, high};",
                    f"add.u32 at, low_b, {(1 << 16) + turn * 2 * BLOCK * row_bytes // 16 + 2 * chunk};",
                    "mov.b64 b, {at, high};",
                    f"wgmma.mma_async.sync.aligned.m64n{columns // len(turns)}k32.f32.e4m3.e4m3 "
                    f"{{{part}}}, a, b, add, 1, 1;",
                ]
            lines += [
                "wgmma.commit_group.sync.aligned;",
                *([told] if ordered else []),
                *(_factors(columns) if blocks and turn == 0 else []),  # while they multiply
                "wgmma.wait_group.sync.aligned 0;",
            ]
            if turn == len(turns) - 1:
                lines += ["bar.warp.sync 0xffffffff;", freed] if blocks else [freed]  # all lanes have read the scales
            for place, number in enumerate(numbers):
                # Of four registers two are of a row and the next two of the eighth behind it, in a group of 8 columns.
                if blocks:
                    piece, product = (0, turn) if in_turn else thirds[number // 16]
                    factor = f"both{4 * piece + 2 * product + number // 2 % 2}"
                    lines.append(f"fma.rn.f32 ${number}, part{place}, {factor}, ${number};")
                else:
                    lines.append(f"add.f32 ${number}, ${number}, part{place};")
        lines += [*_next_stage(stages, depth_tiles), *([] if in_turn else _copied(again, [0])), "}"]
        return "\n".join(lines)

    @gluon.constexpr_function
    def _scale_copies():
        """PTX of the lane that copies a stage's scales: $3 bytes of rows, then four of gate, up, gate, up."""
        begin = "@copies cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        lines = [
            "{ .reg .b32 bytes; .reg .pred copies; mov.u32 bytes, %laneid; setp.eq.u32 copies, bytes, 0;",
            "add.u32 bytes, $3, 64;",
            "@copies mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [$2], bytes;",
            f"{begin} [$1], [$4], $3, [$2];",
            *(f"{begin} [$1+{ROW_SCALES + 16 * number}], [${5 + number}], 16, [$2];" for number in range(4)),
        ]
        return "\n".join([*lines, "mov.b32 $0, 0; }"])

    @gluon.jit
    def _each_lane(number, dtype: gl.constexpr):
        return gl.full([32], number, dtype, gl.BlockedLayout([1], [32], [1], [0]))

    @gluon.jit
    def _each_address(pointer):
        return _each_lane(pointer.to(gl.int64, bitcast=True), gl.int64)

    @gluon.jit
    def load_scales(scales, barriers, stage, depth, row, column, COLUMNS: gl.constexpr):
        """Begin to copy the scales of a stage, which are another part of it, to where `multiply_fp8` reads them.

        scales: those of left and of both weights, and how far apart their lines lie, which is a multiple of four: of
        left lines are along the rows, of the weights along the depth. barriers: their address.

        Copies begin and end at multiples of 16 bytes. Of blocks they are four of a line, from the first and the last
        block of each weight that the tile's COLUMNS are in.
        """
        of_rows, of_gate, of_up, row_line, line = scales
        PTX: gl.constexpr = _scale_copies()
        first = (column // 128).to(gl.int64) * line + depth // 4 * 4
        last = ((column + COLUMNS - 1) // 128).to(gl.int64) * line + depth // 4 * 4
        row = row // 4 * 4
        gl.inline_asm_elementwise(
            PTX,
            "=r,r,r,r,l,l,l,l,l,~{memory}",
            [
                _each_lane(barriers + _BARRIER_BYTES + stage * _SCALE_BYTES, gl.int32),
                _each_lane(barriers + stage * 8, gl.int32),
                _each_lane(min(132, row_line - row) * 4, gl.int32),
                _each_address(of_rows + depth.to(gl.int64) * row_line + row),
                _each_address(of_gate + first),
                _each_address(of_up + first),
                _each_address(of_gate + last),
                _each_address(of_up + last),
            ],
            gl.int32,
            is_pure=False,
            pack=1,
        )

    @gluon.constexpr_function
    def _operands(registers, numbers):
        return ",".join(["=f"] * registers + ["r"] * (32 * numbers) + ["~{memory}"])

    @gluon.constexpr_function
    def _blocks_of(registers):
        return (gl.float32,) * (registers // 32)

    @gluon.constexpr_function
    def _kind(dtype):
        return "f16" if dtype == gl.float16 else "bf16"

    @gluon.jit
    def _copies(number):
        """A number for every element of a block, which are 32 of each thread."""
        return gl.full([_BLOCK, _BLOCK], number, gl.int32, BLOCK_LAYOUT)

    @gluon.jit
    def _sums(LOOP: gl.constexpr, HELD: gl.constexpr, numbers):
        """Run a main loop; the blocks are returned that are in so many registers."""
        OPERANDS: gl.constexpr = _operands(HELD, len(numbers))
        TYPES: gl.constexpr = _blocks_of(HELD)
        return gl.inline_asm_elementwise(LOOP, OPERANDS, numbers, dtype=TYPES, is_pure=False, pack=32)

    @gluon.jit
    def multiply(
        left, right, barriers, step, depth_tiles, parity,
        dtype: gl.constexpr, COLUMNS: gl.constexpr, ME: gl.constexpr, STAGES: gl.constexpr,
    ):  # fmt: skip
        """Run the main loop of one tile, when it is this consumer's turn, and hand the turn over.

        left, right: addresses of STAGES tiles of 2 BLOCK x BLOCK and of 3 BLOCK x BLOCK, of which COLUMNS rows are
        used. barriers: address of `full` of every stage, `empty` of every stage, and `turn` of both consumers. step:
        stages that were used before. parity: of the turn that is awaited.

        COLUMNS belong to two products: BLOCK columns of one, BLOCK of the other, then the rest of each.

        Returns six tensors of BLOCK x BLOCK in fp32, the upper three and then the lower ones: the first BLOCK columns
        of a product, those of the other, and the last BLOCK / 2 columns of each, or zero if BLOCK are all.
        """
        KIND: gl.constexpr = _kind(dtype)
        LOOP: gl.constexpr = _main_loop(2 * _BLOCK, 3 * _BLOCK, 0, _BLOCK, 0, COLUMNS, 192, STAGES, ME, KIND)
        numbers = _copies(left), _copies(right), _copies(barriers), _copies(step), _copies(depth_tiles), _copies(parity)
        return _sums(LOOP, 192, numbers)

    @gluon.jit
    def multiply_blocks(
        at, step, depth_tiles, parity, changed, dtype: gl.constexpr, COLUMNS: gl.constexpr, ME: gl.constexpr,
        STAGES: gl.constexpr, LEFT_ACROSS: gl.constexpr, RIGHT_ACROSS: gl.constexpr, SIDES: gl.constexpr = False,
        COPIED: gl.constexpr = False,
    ):  # fmt: skip
        """As `multiply`, of one product of 2 or 3 BLOCK columns, which are as many blocks of a stage of `right`.

        LEFT_ACROSS, RIGHT_ACROSS: blocks are [depth, BLOCK], as the operand lies in memory.
        SIDES: if `changed` is not 0, both sides have changed: left lies as right else does, and right as left does.
        COPIED: threads copied a part of the stages.

        Returns six tensors of BLOCK x BLOCK in fp32, the upper three and then the lower ones.
        """
        left, right, barriers = at
        KIND: gl.constexpr = _kind(dtype)
        LOOP: gl.constexpr = _main_loop(
            2 * _BLOCK, COLUMNS, 0, _BLOCK, 0, COLUMNS, 192, STAGES, ME, KIND, LEFT_ACROSS, RIGHT_ACROSS, COPIED, SIDES
        )
        numbers = (
            _copies(left), _copies(right), _copies(barriers), _copies(step), _copies(depth_tiles), _copies(parity),
            _copies(changed),
        )  # fmt: skip
        return _sums(LOOP, 192, numbers)

    @gluon.jit
    def multiply_half(
        left, right, barriers, step, depth_tiles,
        dtype: gl.constexpr, COLUMNS: gl.constexpr, STAGE_COLUMNS: gl.constexpr, STAGE_ROWS: gl.constexpr,
        ME: gl.constexpr, STAGES: gl.constexpr,
    ):  # fmt: skip
        """Run the main loop of this consumer's 64 rows of one tile; the other consumer does the same with its own.

        left, right: addresses of the first stage's tile of 2 BLOCK x BLOCK and of its two tiles of STAGE_COLUMNS x
        BLOCK, of which COLUMNS rows are used, at most 2 BLOCK; from a stage to the next it is STAGE_ROWS. barriers:
        address of `full` and `empty` of every stage. step: stages that were used before.

        Returns four tensors of BLOCK x BLOCK in fp32: the first product from left to right, then the second; what is
        right of COLUMNS is zero.
        """
        KIND: gl.constexpr = _kind(dtype)
        LOOP: gl.constexpr = _main_loop(
            STAGE_ROWS, STAGE_ROWS, _BLOCK * ME, 0, STAGE_COLUMNS, COLUMNS, 128, STAGES, -1, KIND
        )
        return _sums(LOOP, 128, (_copies(left), _copies(right), _copies(barriers), _copies(step), _copies(depth_tiles)))

    @gluon.jit
    def multiply_shared(
        left, right, barriers, step, depth_tiles, dtype: gl.constexpr, ME: gl.constexpr, STAGES: gl.constexpr
    ):  # fmt: skip
        """Run the main loop of this consumer's 2 BLOCK rows of one tile of 4; the other consumer has the other rows.

        left, right: addresses of STAGES times 4 and 3 blocks [depth, BLOCK]. barriers, step: as of `multiply_half`.

        Returns six tensors of BLOCK x BLOCK in fp32, the upper three and then the lower ones.
        """
        KIND: gl.constexpr = _kind(dtype)
        LOOP: gl.constexpr = _main_loop(
            4 * _BLOCK, 3 * _BLOCK, 2 * _BLOCK * ME, _BLOCK, 0, 192, 192, STAGES, -1, KIND, True, True
        )
        return _sums(LOOP, 192, (_copies(left), _copies(right), _copies(barriers), _copies(step), _copies(depth_tiles)))

    @gluon.jit
    def multiply_fp8(
        at, step, depth_tiles, row, column, COLUMNS: gl.constexpr, ME: gl.constexpr, STAGES: gl.constexpr,
        BLOCKS: gl.constexpr, ORDERED: gl.constexpr = False,
    ):  # fmt: skip
        """Run the main loop of this consumer's 64 rows of one tile of codes; the other consumer has the other rows.

        left, right, barriers, step, COLUMNS: as in `multiply`, without turns; a stage is 128 of depth. row, column:
        where these 64 rows and the tile begin. BLOCKS, ORDERED: see `_promoting_loop`; by rows sums are those of codes.

        Returns three tensors of BLOCK x BLOCK in fp32 as `multiply` does; of 256 COLUMNS, which are by blocks alone
        and for which a stage has 2 BLOCK rows of each weight, four: gate from left to right, then up.
        """
        left, right, barriers = at
        HELD: gl.constexpr = 128 if COLUMNS == 256 else 96
        LOOP: gl.constexpr = _promoting_loop(COLUMNS, ME, STAGES, BLOCKS, ORDERED)
        given = (  # divisions by a constant: in PTX ptxas would divide by it
            _copies(left), _copies(right), _copies(barriers), _copies(step % STAGES), _copies(step // STAGES & 1),
            _copies(depth_tiles),
        )  # fmt: skip
        if BLOCKS:
            mine = gl.arange(0, _BLOCK, gl.SliceLayout(1, BLOCK_LAYOUT))[:, None] + _copies(0)
            place = mine, _copies(row), _copies(column)
            sums = _sums(LOOP, HELD, given + place)
        else:
            sums = _sums(LOOP, HELD, given)
        return sums
