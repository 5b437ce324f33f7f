"""What fills the ring of a mixture's products: TMA, and threads that copy the rows of tokens; in Gluon.

    produce    every stage of a program's tiles, in turn

A stage has two blocks of a, and two or three of b; of a tall tile, whose rows and columns change sides, three of a and
two of b. Blocks are 64 x 64. Forms of products are those of `hopper_experts.py`.
"""

from swiglu_kernels.hopper.copies import AHEAD, OTHER_ROWS, SLOT_BYTES
from swiglu_kernels.hopper.shared import GLUON_MISSING
from swiglu_kernels.ops.experts.hopper_epilogue import BLOCK, PART
from swiglu_kernels.ops.experts.hopper_tiles import ROWS, TALL_COLUMNS, TALL_ROWS

if GLUON_MISSING is None:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier

    from swiglu_kernels.hopper.copies import answer, ask, copy_rows, first_place, pairs_of, places
    from swiglu_kernels.hopper.loop import BARRIER_BYTES
    from swiglu_kernels.hopper.shared import load
    from swiglu_kernels.ops.experts.hopper_tiles import find, rows_of, steps_of, tiles_of_gradient

    _ROWS, _TALL_ROWS, _TALL_COLUMNS = (gl.constexpr(size) for size in (ROWS, TALL_ROWS, TALL_COLUMNS))
    _BLOCK, _PART = gl.constexpr(BLOCK), gl.constexpr(PART)
    _OTHER_ROWS, _AHEAD, _SLOT_BYTES, _BARRIER_BYTES = (
        gl.constexpr(size) for size in (OTHER_ROWS, AHEAD, SLOT_BYTES, BARRIER_BYTES)
    )

    @gluon.jit
    def _next_rows(unit, pairs, left, pair, starts, counts, units, per_expert):
        """Go on to the rows of the next stage of a weight's gradient, of this tile or of the program's next.

        Returns its tile, a pointer to the pairs of its rows, and how many of them are left.
        """
        pairs += _BLOCK
        left -= _BLOCK
        if left <= 0:
            unit += gl.num_programs(0)
            expert = min(unit, units - 1) // per_expert
            pairs = pair + gl.load(starts + expert)
            left = gl.where(unit < units, gl.load(counts + expert), 0)
        return unit, pairs, left

    @gluon.jit
    def _load(matrix, base, outer, depth, full, buffer, ACROSS: gl.constexpr):
        if ACROSS:
            load(matrix, [base + depth, outer], full, buffer)
        else:
            load(matrix, [base + outer, depth], full, buffer)

    @gluon.jit
    def _load_stage(
        operands, rings, full, stage, begin, base, row, first, at, sizes, COLUMNS: gl.constexpr, FORM: gl.constexpr,
        B_ACROSS: gl.constexpr, INTERLEAVED: gl.constexpr,
    ):  # fmt: skip
        """Begin to load a stage by TMA, or what of it is not copied.

        ones: loaded where the second block of a would begin at M; None: it never does.
        """
        M, N = sizes
        a_ring, b_ring = rings
        a, b, b_rest, ones = operands
        A_ACROSS: gl.constexpr = FORM == "weights"
        BLOCKS: gl.constexpr = COLUMNS // _BLOCK
        LOADED: gl.constexpr = COLUMNS + (0 if a is None else _ROWS)
        of_ones = row + _BLOCK == M
        if ones is not None and a is None and of_ones:
            mbarrier.expect(full, (LOADED + _BLOCK) * _BLOCK * 2)  # elements of 16 bits
        else:
            mbarrier.expect(full, LOADED * _BLOCK * 2)
        if a is not None:
            _load(a, begin, row, at, full, a_ring.index(2 * stage), A_ACROSS)
        if ones is not None and of_ones:
            load(ones, [0, 0], full, a_ring.index(2 * stage + 1))
        elif a is not None:
            _load(a, begin, row + _BLOCK, at, full, a_ring.index(2 * stage + 1), A_ACROSS)
        if FORM == "gate_up" and not INTERLEAVED:
            _load(b, base, first, at, full, b_ring.index(BLOCKS * stage), B_ACROSS)
            _load(b, base, N + first, at, full, b_ring.index(BLOCKS * stage + 1), B_ACROSS)
            if BLOCKS == 3:
                both = b_ring.index(3 * stage + 2)
                load(b_rest, [base + first + _BLOCK, at], full, both.slice(0, _PART, dim=0))
                load(b_rest, [base + N + first + _BLOCK, at], full, both.slice(_PART, _PART, dim=0))
        else:
            for block in gl.static_range(BLOCKS):
                _load(b, base, first + block * _BLOCK, at, full, b_ring.index(BLOCKS * stage + block), B_ACROSS)

    @gluon.jit
    def _load_tall_stage(a, b, a_ring, b_ring, full, stage, base, row, first, at, other, B_ACROSS: gl.constexpr):
        """As `_load_stage`, of a tall tile: rows of a go where else columns of b go, and these where rows of a go.

        other: columns from the first block of them to the second.
        """
        LOADED: gl.constexpr = _TALL_COLUMNS + (0 if a is None else _TALL_ROWS)
        mbarrier.expect(full, LOADED * _BLOCK * 2)
        if a is not None:
            for block in gl.static_range(_TALL_ROWS // _BLOCK):
                load(a, [row + block * _BLOCK, at], full, b_ring.index(_TALL_ROWS // _BLOCK * stage + block))
        _load(b, base, first, at, full, a_ring.index(2 * stage), B_ACROSS)
        _load(b, base, first + other, at, full, a_ring.index(2 * stage + 1), B_ACROSS)

    @gluon.jit
    def _ask_ahead(slots_at, pair, starts, counts, units, per_expert, WARP: gl.constexpr):
        """Ask for the pairs of the first stages, and return what `_next_rows` says of the one after them."""
        first = gl.program_id(0) - gl.num_programs(0)
        later, asked, left = _next_rows(first, pair, 0, pair, starts, counts, units, per_expert)
        for ahead in gl.static_range(_AHEAD):
            ask(slots_at + ahead * _SLOT_BYTES, asked, left, WARP)
            later, asked, left = _next_rows(later, asked, left, pair, starts, counts, units, per_expert)
        return later, asked, left

    @gluon.jit
    def produce(
        WARP: gl.constexpr, given,
        COLUMNS: gl.constexpr, TALL: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, FORM: gl.constexpr,
        B_ACROSS: gl.constexpr, INTERLEAVED: gl.constexpr, EXPERTS: gl.constexpr, SLOTS: gl.constexpr,
    ):  # fmt: skip
        """Fill the ring with the stages of this program's tiles, in turn.

        WARP: the first of four loads by TMA. SLOTS: 0 for sorted rows; else all four copy rows of tokens, a being None.
        """
        (
            a, b, b_rest, ones, a_ring, b_ring, barriers, starts, counts, begins, units, experts, M, N, K, P,
            expert_rows, tokens, token_pieces, pair, a_at, b_at, barriers_at,
        ) = given  # fmt: skip
        OTHERS: gl.constexpr = SLOTS > 0 and FORM == "weights"  # rows in each stage
        COPIED_ROWS: gl.constexpr = _OTHER_ROWS if OTHERS else _ROWS
        COPIED_BLOCKS: gl.constexpr = _ROWS // COPIED_ROWS
        if SLOTS > 0:
            to = first_place(a_at, COPIED_ROWS, WARP)
            if TALL is not None:
                tall_to, more_to = first_place(b_at, _ROWS, WARP), first_place(b_at + _ROWS * _BLOCK * 2, _BLOCK, WARP)
        if OTHERS:
            slots_at = barriers_at + _BARRIER_BYTES
            per_expert = tiles_of_gradient(M, N, COLUMNS)
            later, asked, left = _ask_ahead(slots_at, pair, starts, counts, units, per_expert, WARP)
            pairs = answer(slots_at, WARP)
        step, count = 0, rows_of(counts, experts, EXPERTS, 1)  # here: in the loop it would wait for all copies before
        begin_of = None if begins is None else rows_of(begins, experts, EXPERTS, 1)
        for unit in range(gl.program_id(0), units if SLOTS > 0 or WARP == 0 else 0, gl.num_programs(0)):
            row, first, expert, tall = find(unit, count, M, N, COLUMNS, TALL, FORM, GROUP, ones is not None, begin_of)
            if SLOTS > 0 and not OTHERS:
                before = places(pairs_of(pair + row, COPIED_ROWS, WARP), token_pieces, SLOTS)
                if TALL is not None:
                    last = row + gl.where(tall != 0, _ROWS, 0)  # any that there are, if it is not
                    more = places(pairs_of(pair + last, _BLOCK, WARP), token_pieces, SLOTS)
            begin, base, steps = 0, expert * expert_rows, gl.cdiv(K, _BLOCK)
            if FORM == "weights":
                begin = gl.where(gl.load(counts + expert) > 0, gl.load(starts + expert), P)  # beyond P TMA reads zeros
                base, steps = begin, steps_of(expert, counts)
            if FORM == "gate_up" and INTERLEAVED:
                first *= 2
            if TALL is not None and tall != 0:  # its own loop: whatever makes that of others longer, they all wait for
                for depth in range(steps):
                    stage = step % STAGES
                    at = depth * _BLOCK
                    mbarrier.wait(barriers.index(STAGES + stage), (step // STAGES + 1) & 1)
                    if SLOTS > 0:
                        full_at, begin_at = barriers_at + 8 * stage, stage * (_TALL_ROWS * _BLOCK * 2)
                        copy_rows(more, more_to + begin_at, full_at, tokens + at, 1, False)
                        copy_rows(before, tall_to + begin_at, full_at, tokens + at, 1, True)
                    if WARP == 0:
                        _load_tall_stage(
                            a, b, a_ring, b_ring, barriers.index(stage), stage, base, row, first, at,
                            N if FORM == "gate_up" else _BLOCK, B_ACROSS,
                        )  # fmt: skip
                    step += 1
            else:
                for depth in range(steps):
                    stage = step % STAGES
                    at = depth * _BLOCK
                    full = barriers.index(stage)
                    mbarrier.wait(barriers.index(STAGES + stage), (step // STAGES + 1) & 1)  # passes in the first round
                    if OTHERS:
                        before = places(pairs, token_pieces, SLOTS)
                        ask(slots_at + step % _AHEAD * _SLOT_BYTES, asked, left, WARP)
                        pairs = answer(slots_at + (step + 1) % _AHEAD * _SLOT_BYTES, WARP)
                    if SLOTS > 0:
                        source = tokens + (row if OTHERS else at)
                        stage_at = to + stage * (COPIED_ROWS * COPIED_BLOCKS * _BLOCK * 2)
                        if ones is not None and row + _BLOCK == M:
                            copy_rows(before, stage_at, barriers_at + 8 * stage, source, 1, True)
                        else:
                            copy_rows(before, stage_at, barriers_at + 8 * stage, source, COPIED_BLOCKS, True)
                    if OTHERS:  # behind the copies, since it may wait for memory
                        later, asked, left = _next_rows(later, asked, left, pair, starts, counts, units, per_expert)
                    if WARP == 0:
                        _load_stage(
                            (a, b, b_rest, ones), (a_ring, b_ring), full, stage, begin, base, row, first, at, (M, N),
                            COLUMNS, FORM, B_ACROSS, INTERLEAVED,
                        )  # fmt: skip
                    step += 1
