"""Compiled loops over JSON text: arrays of numbers outside of strings, and their values.

Kept out of the other modules so that importing `harts` does not import numba. Places are unsigned, so that no loop
looks for negative ones. Eight digits are looked at together (Lemire 2018, https://lemire.me/blog/2018/10/03/), because
a branch on how many an id has is mispredicted as often as not.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

QUOTE, BACKSLASH, OPEN, CLOSE, COMMA, MINUS, PLUS, DOT, ZERO, SPACE = (np.uint8(ord(c)) for c in '"\\[],-+.0 ')
SMALL_E, LARGE_E, TRUE, FALSE = (np.uint8(ord(c)) for c in "eEtf")
INTEGERS, BITS, FLAGS, FLOATS = 0, 1, 2, 3
"""Kinds of arrays; bits are integers 0 and 1."""
DTYPES = (np.int64, np.int8, np.bool_, np.float64)
"""Of each kind."""
MAX_DIGITS = 18
"""Of an integer: as many as always fit into 64 bits."""
MAX_EXACT, MAX_POWER = np.uint64(2**53), 22
"""Up to these, digits and a power of ten are exact floats, so their product or quotient is rounded once (Clinger
1990)."""
POWERS = np.array([10.0**power for power in range(MAX_POWER + 1)])
WORDS = np.array([list(b"false,"), list(b"true,,")], dtype=np.uint8)

NIBBLES = np.uint64(0x3030303030303030)
ABOVE_NINE = np.uint64(0x4646464646464646)
HIGH_BITS = np.uint64(0x8080808080808080)
PLACES = np.uint64(0x0001020304050607)
FOUR_BITS, FOUR_ZEROS = np.uint64(0xFFFEFFFEFFFEFFFE), np.uint64(0x2C302C302C302C30)
"""Of `0,1,0,1,` but for the bits, the first byte the lowest: masks are read four at a time."""
LOW_PAIRS = np.uint64(0x000000FF000000FF)
ODD_PAIRS, EVEN_PAIRS = np.uint64(100 + (1000000 << 32)), np.uint64(1 + (10000 << 32))
U0, U1, U7, U8, U10, U16, U32, U56, U64 = (np.uint64(n) for n in (0, 1, 7, 8, 10, 16, 32, 56, 64))


@numba.njit(cache=True, nogil=True)
def find_arrays(content: NDArray[np.uint8], last: int, least: int):
    """Parse the arrays of numbers, or of true and false, in a text.

    Args:
        content: [bytes] uint8. JSON.
        last: Place of the last closing bracket, at which all loops end.
        least: Elements of an array, at least.

    Returns:
        found: [arrays, 5] int64. Place of the opening bracket, one past the closing one, kind, begin and end in values.
        values: int64, or float64 of the same bits.
    """
    found = np.empty((8, 5), dtype=np.int64)
    values = np.empty(content.size // 2 + 1, dtype=np.int64)
    floats = values.view(np.float64)
    size, used, i = 0, 0, U0
    stop = np.uint64(last)
    while i < stop:
        if content[i] == QUOTE:
            i += U1
            while i < stop and content[i] != QUOTE:
                i += U1 + np.uint64(content[i] == BACKSLASH)
        elif content[i] == OPEN:
            kind = INTEGERS
            first = content[_after_spaces(content, i + U1)]
            if first in (TRUE, FALSE):
                kind = FLAGS
                end, count = _flags(content, i + U1, values[used:])
            else:
                end, count, all_bits = _integers(content, i + U1, values[used:])
                kind = BITS if all_bits <= U1 else INTEGERS
                if content[end] == DOT or content[end] == SMALL_E or content[end] == LARGE_E:
                    kind = FLOATS
                    end, count = _floats(content, i + U1, floats[used:])
            if content[end] == CLOSE and count >= least:
                if size == found.shape[0]:
                    found = np.concatenate((found, found))
                found[size] = (np.int64(i), np.int64(end) + 1, kind, used, used + count)
                size, used, i = size + 1, used + count, end
        i += U1
    return found[:size], values


@numba.njit(cache=True)
def _integers(content, i, values):
    """Place of the closing bracket, or of what does not belong there; how many there are; all their bits."""
    count, all_bits = 0, U0
    safe = np.uint64(max(content.size - 8, 0))
    while True:
        i = _after_spaces(content, i)
        digits, value = U0, U0
        if i <= safe:
            eight = _eight(content, i)
            if (eight & FOUR_BITS) == FOUR_ZEROS:
                for k in range(4):
                    values[count + k] = np.int64((eight >> np.uint64(16 * k)) & U1)
                all_bits |= U1
                count += 4
                i += U8
                continue
            ends = ((eight + ABOVE_NINE) | (eight - NIBBLES)) & HIGH_BITS
            if ends != U0:
                digits = (((ends & (U0 - ends)) >> U7) * PLACES) >> U56
                value = _number((eight - NIBBLES) << (U64 - U8 * digits))
        start = i
        if digits == U0:
            # A sign, more than seven digits, the end of the text, or no number.
            start += np.uint64(content[i] == MINUS)
            end, value = _digits(content, start, U0)
            digits = end - start
            if digits == U0 or digits > np.uint64(MAX_DIGITS):
                return start, 0, U0
            value = U0 - value if start > i else value
        i = start + digits
        if content[start] == ZERO and digits > U1:
            return start, 0, U0
        values[count] = np.int64(value)
        all_bits |= value
        count += 1
        i = _after_spaces(content, i)
        if content[i] != COMMA:
            return i, count, all_bits
        i += U1


@numba.njit(cache=True)
def _floats(content, i, values):
    """As `_integers`; all are floats, and exact after one rounding, or the count is 0."""
    count = 0
    while True:
        i = _after_spaces(content, i)
        negative = content[i] == MINUS
        i += np.uint64(negative)
        start = i
        i, value = _digits(content, i, U0)
        length = np.int64(i - start)
        power, is_float, bad = 0, False, length == 0 or (length > 1 and content[start] == ZERO)
        if content[i] == DOT:
            dot = i
            i, value = _digits(content, i + U1, value)
            power = np.int64(dot + U1) - np.int64(i)
            bad |= power == 0
            length, is_float = length - power, True
        if content[i] == SMALL_E or content[i] == LARGE_E:
            i += U1
            down = content[i] == MINUS
            i += np.uint64(down or content[i] == PLUS)
            start = i
            i, exponent = _digits(content, i, U0)
            bad |= i == start or i - start > np.uint64(MAX_DIGITS)
            power += -np.int64(exponent) if down else np.int64(exponent)
            is_float = True
        # With leading zeros more digits would fit, but nobody writes many.
        if bad or not is_float or length > MAX_DIGITS or value > MAX_EXACT or abs(power) > MAX_POWER:
            return U0, 0
        scaled = value / POWERS[-power] if power < 0 else value * POWERS[power]
        values[count] = -scaled if negative else scaled
        count += 1
        i = _after_spaces(content, i)
        if content[i] != COMMA:
            return i, count
        i += U1


@numba.njit(cache=True)
def _flags(content, i, values):
    """As `_integers`, of true and false."""
    count = 0
    while True:
        i = _after_spaces(content, i)
        word = WORDS[np.int64(content[i] == TRUE)]
        k = 0
        while word[k] != COMMA:
            if content[i] != word[k]:
                return U0, 0
            i += U1
            k += 1
        values[count] = k == 4
        count += 1
        i = _after_spaces(content, i)
        if content[i] != COMMA:
            return i, count
        i += U1


@numba.njit(cache=True, inline="always")
def _after_spaces(content, i):
    while content[i] == SPACE or (content[i] < SPACE and content[i] in (9, 10, 13)):
        i += U1
    return i


@numba.njit(cache=True, inline="always")
def _eight(content, i):
    """Eight bytes as one number, the first the lowest; the compiler makes one load of it."""
    number = U0
    for k in range(8):
        number |= np.uint64(content[i + np.uint64(k)]) << np.uint64(8 * k)
    return number


@numba.njit(cache=True, inline="always")
def _number(digits):
    """The number that eight bytes of values 0 to 9 spell, the lowest byte first."""
    pairs = digits * U10 + (digits >> U8)
    return ((pairs & LOW_PAIRS) * ODD_PAIRS + ((pairs >> U16) & LOW_PAIRS) * EVEN_PAIRS) >> U32


@numba.njit(cache=True, inline="always")
def _digits(content, i, value):
    """One past the digits at a place, and the value with them; it overflows after 18 digits."""
    while content[i] >= ZERO and content[i] <= ZERO + 9:
        value = U10 * value + np.uint64(content[i] - ZERO)
        i += U1
    return i, value
