"""What ends a tile of a mixture's products: bias, gate, the gate's gradients, and the stores; in Gluon.

    finish            h and pre of gate and up, halves or in turn; or the product itself
    finish_tall       the same of a tall tile, whose rows are columns of these; not of gate and up in turn
    put_sums          one row of a product that has the same in all
    finish_backward   d_pre, weight * h and the dots of h and d_h from d_h

Parts of a tile leave through buffers of a consumer that are taken in turn; gate and up of the backward arrive in others
(`fetch`), two parts, which are a block, ahead.
"""

from swiglu_kernels.hopper.shared import GLUON_MISSING
from swiglu_kernels.ops.gate.formula import bounded, passes

BLOCK, PART = 64, 32
"""Rows, columns and depth of what is loaded at once; columns of what is stored at once."""
BUFFERS = 3
"""Of each consumer, through which parts are stored."""
BLOCKS = 3
"""Side by side in a wide tile, as those of the backward are."""

if GLUON_MISSING is None:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

    from swiglu_kernels.hopper.shared import fill, halves, load, sigmoid, store, view, write

    _BLOCK, _PART, _BUFFERS, _BLOCKS = (gl.constexpr(size) for size in (BLOCK, PART, BUFFERS, BLOCKS))

    @gluon.jit
    def _biased(value, bias, at, TALL: gl.constexpr = False):
        """Add a bias to each column of a part, or to each row of a TALL tile's."""
        if bias is not None and TALL:
            rows = gl.arange(0, value.shape[0], gl.SliceLayout(1, value.type.layout))
            value += gl.load(bias + at + rows).to(gl.float32)[:, None]
        elif bias is not None:
            columns = gl.arange(0, value.shape[1], gl.SliceLayout(0, value.type.layout))
            value += gl.load(bias + at + columns).to(gl.float32)[None, :]
        return value

    @gluon.jit
    def _gated(gate, up, numbers, FORMULA: gl.constexpr):
        """Return silu(gate) * up, or what FORMULA says."""
        if FORMULA == "silu":
            value = gate * sigmoid(gate) * up
        else:
            alpha, limit, up_offset = numbers
            gate, up = bounded(gate, up, limit)
            value = gate * sigmoid(alpha * gate) * (up + up_offset)
        return value

    @gluon.jit
    def _gradients(d_h, gate, up, numbers, FORMULA: gl.constexpr):
        """Return d_gate, d_up and h."""
        if FORMULA == "silu":
            slope = sigmoid(gate)
            silu = gate * slope
            d_gate = d_h * up * (slope + silu * (1.0 - slope))
            d_up, h = d_h * silu, silu * up
        else:
            alpha, limit, up_offset = numbers
            g, u = bounded(gate, up, limit)
            u += up_offset
            slope = sigmoid(alpha * g)
            silu = g * slope
            d_gate = gl.where(passes(gate, limit), d_h * u * (slope + alpha * silu * (1.0 - slope)), 0.0)
            d_up = gl.where(passes(gl.abs(up), limit), d_h * silu, 0.0)
            h = silu * u
        return d_gate, d_up, h

    @gluon.jit
    def _write_part(part, out, row, column, buffer, TURN: gl.constexpr):
        """Send a part to global memory through the next of TURN buffers, transposed where the buffer lies so."""
        if buffer.shape[0] == _PART:
            fill(part, out, buffer.permute((1, 0)), TURN - 1)
            store(out, [column, row], buffer)
        else:
            write(part, out, row, column, buffer, TURN - 1)

    @gluon.jit
    def _put(
        block, bias, out, row, column, bias_at, buffers,
        FIRST: gl.constexpr, NUMBER: gl.constexpr, TURN: gl.constexpr, TALL: gl.constexpr = False,
    ):  # fmt: skip
        """Store a block of an output through TURN buffers, which are taken in turn."""
        left, right = halves(block, _BLOCK, _PART)
        left = _biased(left, bias, bias_at, TALL)
        right = _biased(right, bias, bias_at if TALL else bias_at + _PART, TALL)
        _write_part(left, out, row, column, buffers.index(FIRST + 2 * NUMBER % TURN), TURN)
        _write_part(right, out, row, column + _PART, buffers.index(FIRST + (2 * NUMBER + 1) % TURN), TURN)

    @gluon.jit
    def _put_gated(
        gate, up, operands, row, column, N, bias_at, numbers, buffers, FIRST: gl.constexpr, NUMBER: gl.constexpr,
        TURN: gl.constexpr, FORMULA: gl.constexpr, TALL: gl.constexpr = False,
    ):  # fmt: skip
        """Store PART columns of h, or rows of it if TALL, and of gate and up where they are kept."""
        bias, h, pre = operands
        gate = _biased(gate, bias, bias_at, TALL)
        up = _biased(up, bias, bias_at + N, TALL)
        value = _gated(gate, up, numbers, FORMULA)
        if pre is None:
            _write_part(value, h, row, column, buffers.index(FIRST + NUMBER % TURN), TURN)
        else:
            _write_part(gate, pre, row, column, buffers.index(FIRST), _BUFFERS)
            up_row, up_column = (row + N, column) if TALL else (row, column + N)
            _write_part(up, pre, up_row, up_column, buffers.index(FIRST + 1), _BUFFERS)
            _write_part(value, h, row, column, buffers.index(FIRST + 2), _BUFFERS)

    @gluon.jit
    def _put_pairs(
        block, bias, h, pre, row, column, bias_at, numbers, buffers,
        FIRST: gl.constexpr, NUMBER: gl.constexpr, TURN: gl.constexpr, FORMULA: gl.constexpr,
    ):  # fmt: skip
        """Store PART columns of h from a block of gate and up in turn, and the block itself where it is kept."""
        block = _biased(block, bias, bias_at)
        gate, up = block.reshape([_BLOCK, _PART, 2]).split()
        value = _gated(gate, up, numbers, FORMULA)
        if pre is None:
            write(value, h, row, column, buffers.index(FIRST + NUMBER % TURN), TURN - 1)
        else:
            left, right = halves(block, _BLOCK, _PART)
            write(left, pre, row, 2 * column, buffers.index(FIRST), _BUFFERS - 1)
            write(right, pre, row, 2 * column + _PART, buffers.index(FIRST + 1), _BUFFERS - 1)
            write(value, h, row, column, buffers.index(FIRST + 2), _BUFFERS - 1)

    @gluon.jit
    def finish(
        thirds, operands, row, column, N, bias_at, numbers, buffers, COLUMNS: gl.constexpr, FIRST: gl.constexpr,
        FORM: gl.constexpr, INTERLEAVED: gl.constexpr, FORMULA: gl.constexpr,
    ):  # fmt: skip
        """Store one half of a tile's rows."""
        out, pre, bias = operands
        third_0, third_1, third_2 = thirds
        TURN: gl.constexpr = COLUMNS // _BLOCK  # buffers, so that as many parts are a multiple of them
        if FORM != "gate_up":
            _put(third_0, bias, out, row, column, bias_at, buffers, FIRST, 0, TURN)
            _put(third_1, bias, out, row, column + _BLOCK, bias_at + _BLOCK, buffers, FIRST, 1, TURN)
            if COLUMNS == 3 * _BLOCK:
                _put(third_2, bias, out, row, column + 2 * _BLOCK, bias_at + 2 * _BLOCK, buffers, FIRST, 2, TURN)
        elif INTERLEAVED:
            _put_pairs(third_0, bias, out, pre, row, column, bias_at, numbers, buffers, FIRST, 0, TURN, FORMULA)
            _put_pairs(
                third_1, bias, out, pre, row, column + _PART, bias_at + _BLOCK, numbers, buffers,
                FIRST, 1, TURN, FORMULA,
            )  # fmt: skip
            if COLUMNS == 3 * _BLOCK:
                _put_pairs(
                    third_2, bias, out, pre, row, column + 2 * _PART, bias_at + 2 * _BLOCK, numbers,
                    buffers, FIRST, 2, TURN, FORMULA,
                )  # fmt: skip
        else:
            gate_0, gate_1 = halves(third_0, _BLOCK, _PART)
            up_0, up_1 = halves(third_1, _BLOCK, _PART)
            _put_gated(
                gate_0, up_0, (bias, out, pre), row, column, N, bias_at, numbers, buffers, FIRST, 0, TURN, FORMULA,
            )  # fmt: skip
            _put_gated(
                gate_1, up_1, (bias, out, pre), row, column + _PART, N, bias_at + _PART, numbers, buffers, FIRST, 1,
                TURN, FORMULA,
            )  # fmt: skip
            if COLUMNS == 3 * _BLOCK:
                gate_2, up_2 = halves(third_2, _BLOCK, _PART)
                _put_gated(
                    gate_2, up_2, (bias, out, pre), row, column + _BLOCK, N, bias_at + _BLOCK, numbers, buffers, FIRST,
                    2, TURN, FORMULA,
                )  # fmt: skip

    @gluon.jit
    def _put_tall(
        upper, lower, out, pre, bias, row, column, N, bias_at, numbers, buffers,
        FIRST: gl.constexpr, FORM: gl.constexpr, FORMULA: gl.constexpr,
    ):  # fmt: skip
        """Store two blocks of a tall tile, one above the other; row and column are those of the tile, not of out."""
        if FORM == "gate_up":
            gate_0, gate_1 = halves(upper, _BLOCK, _PART)
            up_0, up_1 = halves(lower, _BLOCK, _PART)
            _put_gated(
                gate_0, up_0, (bias, out, pre), row, column, N, bias_at, numbers, buffers, FIRST, 0, 2, FORMULA, True,
            )  # fmt: skip
            _put_gated(
                gate_1, up_1, (bias, out, pre), row, column + _PART, N, bias_at, numbers, buffers, FIRST, 1, 2, FORMULA,
                True,
            )  # fmt: skip
        else:
            _put(upper, bias, out, row, column, bias_at, buffers, FIRST, 0, 2, True)
            _put(lower, bias, out, row + _BLOCK, column, bias_at + _BLOCK, buffers, FIRST, 1, 2, True)

    @gluon.jit
    def finish_tall(
        thirds, out, pre, bias, row, column, N, bias_at, numbers, buffers, FIRST: gl.constexpr, FORM: gl.constexpr,
        FORMULA: gl.constexpr,
    ):  # fmt: skip
        """Store a tall tile: its columns are rows of out, its upper 64 rows are columns of gate, and its lower of up.

        Without a gate, its rows are 128 columns of out. out, pre: descriptors for PART rows and BLOCK columns.
        """
        third_0, third_1, third_2, lower_0, lower_1, lower_2 = thirds
        LAYOUT: gl.constexpr = out.layout
        across = view(buffers, out.dtype, [2 * _BUFFERS, _PART, _BLOCK], LAYOUT)
        for third in range(3):
            _put_tall(
                third_0, lower_0, out, pre, bias, column, row + third * _BLOCK, N, bias_at, numbers, across,
                FIRST, FORM, FORMULA,
            )  # fmt: skip
            third_0, third_1, lower_0, lower_1 = third_1, third_2, lower_1, lower_2
        tma.store_wait(0)  # other tiles take other buffers in turn

    @gluon.jit
    def put_sums(third_0, third_1, third_2, sums):
        """Store the first row of 64 that are alike."""
        rows = gl.arange(0, _BLOCK, gl.SliceLayout(1, third_0.type.layout))[:, None]
        at = sums + gl.arange(0, _BLOCK, gl.SliceLayout(0, third_0.type.layout))[None, :] + rows * 0
        for _ in range(_BLOCKS):
            gl.store(at, third_0.to(sums.dtype.element_ty), mask=rows == 0)
            at += _BLOCK
            third_0, third_1 = third_1, third_2

    @gluon.jit
    def fetch(pre, row, column, N, reads, loaded, SET: gl.constexpr, INTERLEAVED: gl.constexpr):
        """Begin to load gate and up of PART columns into a set of buffers."""
        full = loaded.index(SET)
        mbarrier.expect(full, _BLOCK * _BLOCK * 2)
        if INTERLEAVED:
            load(pre, [row, 2 * column], full, reads.index(SET))
        else:
            load(pre, [row, column], full, reads.index(2 * SET))
            load(pre, [row, N + column], full, reads.index(2 * SET + 1))

    @gluon.jit
    def _put_gradients(
        d_h, weight, dots, operands, places, more, parity, N, numbers, memory, ME: gl.constexpr, SIDE: gl.constexpr,
        INTERLEAVED: gl.constexpr, FORMULA: gl.constexpr,
    ):  # fmt: skip
        """Store PART columns of d_pre and weight * h, a SIDE of a block; begin to load gate and up of the next block's.

        d_h is still without the routing weight. more: there is a next block. Returns dots with theirs.
        """
        row, column, next_row, next_column = places
        reads, buffers, h_buffers, loaded = memory
        pre, d_pre, weighted_h = operands
        SET: gl.constexpr = 2 * ME + SIDE
        mbarrier.wait(loaded.index(SET), parity)
        if INTERLEAVED:
            pairs = reads.index(SET).load(gl.join(d_h, d_h).reshape([_BLOCK, _BLOCK]).type.layout)
            gate, up = pairs.reshape([_BLOCK, _PART, 2]).split()
            gate = gl.convert_layout(gate, d_h.type.layout).to(gl.float32)
            up = gl.convert_layout(up, d_h.type.layout).to(gl.float32)
        else:
            gate = reads.index(2 * SET).load(d_h.type.layout).to(gl.float32)
            up = reads.index(2 * SET + 1).load(d_h.type.layout).to(gl.float32)
        d_gate, d_up, h = _gradients(d_h * weight[:, None], gate, up, numbers, FORMULA)
        dots += gl.sum(d_h * h, 1)
        tma.store_wait(0)
        if INTERLEAVED:
            buffers.index(ME).store(gl.join(d_gate, d_up).reshape([_BLOCK, _BLOCK]).to(d_pre.dtype))
        else:
            buffers.index(2 * ME).store(d_gate.to(d_pre.dtype))
            buffers.index(2 * ME + 1).store(d_up.to(d_pre.dtype))
        h_buffers.index(ME).store((h * weight[:, None]).to(d_pre.dtype))
        fence_async_shared()
        if INTERLEAVED:
            store(d_pre, [row, 2 * column], buffers.index(ME))
        else:
            store(d_pre, [row, column], buffers.index(2 * ME))
            store(d_pre, [row, N + column], buffers.index(2 * ME + 1))
        store(weighted_h, [row, column], h_buffers.index(ME))
        if more:
            fetch(pre, next_row, next_column, N, reads, loaded, SET, INTERLEAVED)
        return dots

    @gluon.jit
    def weights_of(row, pair, weights, LAYOUT: gl.constexpr):
        """Return the routing weights of BLOCK rows, zero where there is no row."""
        pairs = gl.load(pair + row + gl.arange(0, _BLOCK, LAYOUT))
        return gl.load(weights + pairs, mask=pairs >= 0, other=0.0).to(gl.float32)

    @gluon.jit
    def finish_backward(
        tile, dots_out, operands, row, column, skipped, N, numbers, memory, ME: gl.constexpr,
        INTERLEAVED: gl.constexpr, FORMULA: gl.constexpr,
    ):  # fmt: skip
        """Make d_pre, weight * h and the dots of a tile, whose first block's gate and up are fetched.

        skipped: blocks of each half that belong to the tile before.

        A loop, though each turn moves what is left through the registers: written out, it has more instructions than
        their cache holds.
        """
        third_0, third_1, third_2, lower_0, lower_1, lower_2, weight, lower_weight = tile
        LAYOUT: gl.constexpr = weight.type.layout
        dots = gl.zeros([_BLOCK], gl.float32, LAYOUT)
        parity = 0
        for number in range(2 * _BLOCKS):
            across = number % _BLOCKS
            if across >= skipped:
                here, at = row + number // _BLOCKS * _BLOCK, column + across * _BLOCK
                last = across == _BLOCKS - 1
                next_row = gl.where(last, row + _BLOCK, here)
                next_at = gl.where(last, column + skipped * _BLOCK, at + _BLOCK)
                more = number < 2 * _BLOCKS - 1
                left, right = halves(third_0, _BLOCK, _PART)
                dots = _put_gradients(
                    left, weight, dots, operands, (here, at, next_row, next_at), more, parity, N,
                    numbers, memory, ME, 0, INTERLEAVED, FORMULA,
                )  # fmt: skip
                dots = _put_gradients(
                    right, weight, dots, operands, (here, at + _PART, next_row, next_at + _PART), more,
                    parity, N, numbers, memory, ME, 1, INTERLEAVED, FORMULA,
                )  # fmt: skip
                parity ^= 1
                if last:
                    gl.store(dots_out + here + gl.arange(0, _BLOCK, LAYOUT), dots)
                    dots = gl.zeros([_BLOCK], gl.float32, LAYOUT)
                    weight = lower_weight
            third_0, third_1, third_2, lower_0, lower_1 = third_1, third_2, lower_0, lower_1, lower_2
