"""Triton's interpreter without the costs that make most of its time for small tensors.

It checks every sum of 32-bit integers for overflow by another one in 64 bits (kernels of `verify` in the tests of the
command line still run with that check, in their own processes), patches `triton.language` anew for each device
function of a launch, makes types and shapes anew for every value, asks of two operands of one type what type both are
to have, converts bit by bit, and multiplies what is not in fp32 without BLAS. Masks must be booleans, as in 3.9.
"""

import dataclasses
import functools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np


def quicken() -> None:
    """Change the interpreter of this process."""
    from triton import language
    from triton.runtime import interpreter

    builder: Any = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _patch_once(interpreter._patch_lang, language)
    interpreter._patch_builtin = _list_once(interpreter._patch_builtin)
    _keep_types(language.core)
    _know_operands(language.core, interpreter.interpreter_semantic)
    _refuse_masks(interpreter.InterpreterBuilder)
    _convert_by_tables(interpreter)
    _multiply_by_blas(interpreter, language.float16)


def _patch_once(patch: Any, language: Any) -> Any:
    scopes: dict[frozenset[str], Any] = {}

    def patch_once(fn: Any) -> Any:
        modules = frozenset(v.__name__ for v in fn.__globals__.values() if v is language or v is language.core)
        if modules in scopes:
            return None  # a device function's, which Triton does not ask to restore
        scope = scopes[modules] = patch(fn)
        if len(scopes) == 1:  # the kernel's
            own = scope.restore

            def restore() -> None:
                while len(scopes) > 1:
                    scopes.popitem()[1].restore()
                scopes.clear()
                own()

            scope.restore = restore
        return scope

    return patch_once


def _list_once(patch: Any) -> Any:
    found: dict[Any, list[tuple[Any, str, Any]]] = {}

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in found:
            found[package] = changes = []
            patch(package, builder, SimpleNamespace(set_attr=lambda *change: changes.append(change)))
        for change in found[package]:
            scope.set_attr(*change)

    return patch_builtin


def _keep_types(core: Any) -> None:
    @functools.cache
    def lengths(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = lengths(type.shape if type.is_block() else ())

    make = core.block_type.__init__
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in blocks:
            make(self, element_ty, shape)
            blocks[key] = dict(vars(self), sizes=key[1:])
        vars(self).update(blocks[key], element_ty=element_ty)

    compare, same = core.tuple.__eq__, core.constexpr(True)
    core.tuple.__eq__ = lambda self, other: same if self is other else compare(self, other)
    core.tensor.__init__ = tensor
    core.block_type.__init__ = block_type


def _know_operands(core: Any, semantic: Any) -> None:
    """Where both are of one type, or one is a number that the other's type holds, and where no shape changes."""
    kind, unwrap, equal = type(semantic), core._unwrap_if_constexpr, core.dtype.__eq__
    check, broadcast = kind.binary_op_type_checking_impl, kind.broadcast_impl_value
    plain, core.dtype.sizes = {int, float, bool, core.dtype, core.block_type, core.tensor}, None

    def checked(self: Any, lhs: Any, rhs: Any, *how: Any, **named: Any) -> Any:
        if type(lhs) is core.tensor:
            scalar = lhs.type.scalar.name
            if type(rhs) is core.tensor:
                if scalar in ("int1", "int32", "int64", "fp32") and scalar == rhs.type.scalar.name:
                    return self.broadcast_impl_value(lhs, rhs)
            elif (scalar == "fp32" and type(rhs) in (int, float)) or (
                scalar == "int32" and type(rhs) is int and -(2**31) <= rhs < 2**31
            ):
                return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, lhs.type.scalar))
        return check(self, lhs, rhs, *how, **named)

    core._unwrap_if_constexpr = lambda given: given if type(given) in plain else unwrap(given)
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    kind.binary_op_type_checking_impl = checked
    kind.broadcast_impl_value = lambda self, lhs, rhs: (
        (lhs, rhs) if lhs.type.sizes == rhs.type.sizes else broadcast(self, lhs, rhs)
    )


def _refuse_masks(builder: Any) -> None:
    load, store = builder.create_masked_load, builder.create_masked_store

    def known(mask: Any) -> Any:
        assert mask.data.dtype == np.bool_, f"a mask of {mask.data.dtype}"
        return mask

    builder.create_masked_load = lambda self, ptrs, mask, *how: load(self, ptrs, known(mask), *how)
    builder.create_masked_store = lambda self, ptrs, value, mask, *how: store(self, ptrs, value, known(mask), *how)


def _convert_by_tables(interpreter: Any) -> None:
    convert, numpy_type = interpreter._convert_float, interpreter._get_np_dtype
    tables, numpy_types = dict[tuple[str, str], Any](), dict[str, Any]()

    def by_table(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.primitive_bitwidth >= target.primitive_bitwidth or source.primitive_bitwidth > 16:
            return convert(data, source, target, rounding)
        key = source.name, target.name
        codes = np.dtype(f"uint{source.primitive_bitwidth}")
        if key not in tables:
            tables[key] = convert(np.arange(2**source.primitive_bitwidth, dtype=codes), source, target, rounding)
        return tables[key][data.view(codes)]

    def kept(type: Any) -> Any:
        name = type.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(type)
        return numpy_types[name]

    interpreter._convert_float, interpreter._get_np_dtype = by_table, kept


def _multiply_by_blas(interpreter: Any, float16: Any) -> None:
    multiply = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        if d.data.dtype != np.float32:
            return multiply(self, a, b, d, *how)
        product = np.matmul(*(_fp32(one, interpreter, float16) for one in (a, b)))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _fp32(one: Any, interpreter: Any, float16: Any) -> Any:
    data = one.data
    if one.dtype.primitive_bitwidth == 8 and one.dtype.is_floating():
        data = interpreter._convert_float(data, one.dtype, float16, None).view(np.float16)
    return data.astype(np.float32)
