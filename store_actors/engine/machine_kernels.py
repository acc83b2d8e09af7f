"""Instructions of the processor that Numba has no name for: wide products, loads of whole words from bytes, prefetches.

A prefetch has a cache line loaded while the loop goes on. Loops over hash tables compute a block of positions first, prefetch them all,
and then look at them: the processor loads many lines at once, where a loop that depends on each look before it starts the next would
wait for every one.
"""

from __future__ import annotations

from numba import njit, void
from numba.core import cgutils
from numba.extending import intrinsic
from numba.types import boolean, int64, uint8, uint64

_BIT, _BYTE, _INT, _WORD, _WIDE = (cgutils.ir.IntType(bits) for bits in (1, 8, 32, 64, 128))
_WORD_BYTES = 8
u8_1 = uint8[::1]


def _pointer(context, builder, array_type, array, position):
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [position])


@intrinsic
def upper_product(typing_context, left, right):
    """Return the upper word of the product of two words."""

    def generate(context, builder, signature, arguments):
        product = builder.mul(*(builder.zext(argument, _WIDE) for argument in arguments))
        return builder.trunc(builder.lshr(product, _WIDE(64)), _WORD)

    return uint64(uint64, uint64), generate


@intrinsic
def prefetch(typing_context, array, position):
    """Have the cache line of an item of an array (by its position in C order, which is not checked) loaded."""

    def generate(context, builder, signature, arguments):
        line = builder.bitcast(_pointer(context, builder, signature.args[0], *arguments), _BYTE.as_pointer())
        kind = cgutils.ir.FunctionType(cgutils.ir.VoidType(), [line.type, _INT, _INT, _INT])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # To be read, to be kept in all caches, as data.
        builder.call(function, [line, _INT(0), _INT(3), _INT(1)])
        return context.get_dummy_value()

    return void(array, int64), generate


@intrinsic
def load_word(typing_context, array, position):
    """Return the eight bytes of a byte array from a position on (which is not checked) as a word, the first the lowest."""

    def generate(context, builder, signature, arguments):
        pointer = _pointer(context, builder, signature.args[0], *arguments)
        return builder.load(builder.bitcast(pointer, _WORD.as_pointer()), align=1)

    return uint64(array, int64), generate


@intrinsic
def store_word(typing_context, array, position, word):
    """Write a word to eight bytes of a byte array, as :func:`load_word` reads them."""

    def generate(context, builder, signature, arguments):
        array_value, position_value, word_value = arguments
        pointer = _pointer(context, builder, signature.args[0], array_value, position_value)
        builder.store(word_value, builder.bitcast(pointer, _WORD.as_pointer()), align=1)
        return context.get_dummy_value()

    return void(array, int64, uint64), generate


@njit(boolean(u8_1, int64, u8_1, int64, int64), cache=True, nogil=True, inline="always")
def same_bytes(left, left_at, right, right_at, length):
    """Return whether `length` bytes of two arrays are the same, each from a place on."""
    if length < _WORD_BYTES:
        for step in range(length):
            if left[left_at + step] != right[right_at + step]:
                return False
        return True
    last = length - _WORD_BYTES
    for step in range(0, last, _WORD_BYTES):
        if load_word(left, left_at + step) != load_word(right, right_at + step):
            return False
    # The last word begins where it has to, over bytes that were looked at.
    return load_word(left, left_at + last) == load_word(right, right_at + last)


@njit(void(u8_1, int64, int64, u8_1, int64), cache=True, nogil=True, inline="always")
def copy_bytes(source, begin, length, target, at):
    """Copy `length` bytes from ``source[begin:]`` to ``target[at:]``."""
    if length < _WORD_BYTES:
        for step in range(length):
            target[at + step] = source[begin + step]
    else:
        last = length - _WORD_BYTES
        for step in range(0, last, _WORD_BYTES):
            store_word(target, at + step, load_word(source, begin + step))
        store_word(target, at + last, load_word(source, begin + last))
