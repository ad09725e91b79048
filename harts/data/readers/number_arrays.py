"""JSON objects whose long arrays of numbers become NumPy arrays without a Python object a number.

Arrays are cut out of the text and parsed by compiled loops; the json module parses the rest, in which a number of a
form that nothing else has stands for each. What the loops do not know (integers of more than 18 digits, integers among
floats, NaN, nested lists) stays in the rest. So values and errors are those of the json module, several times as fast.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEAST = 64
"""Numbers from which on an array is cut out; of shorter ones lists are quicker."""
# A float that is written like this is 0, so nobody writes it. The number of the array follows.
MARK = b"0E9"


def parse_object(data: bytes) -> dict[str, Any] | None:
    """Parse an object, with NumPy arrays for long arrays of numbers or of true and false.

    Args:
        data: JSON.

    Returns:
        None if the text is damaged, is no object, or holds no long array: then json.loads says what it is.

    Example:
        >>> parse_object(b'{"token_ids": [' + b"7, " * 99 + b'7], "group_id": 3}')["token_ids"].sum()
        np.int64(700)
    """
    last = data.rfind(b"]")
    # Two bytes a number, at least.
    if last < 2 * LEAST:
        return None
    rest, arrays = _cut(data, last)
    if not arrays:
        return None

    def number(text: str) -> Any:
        return arrays[int(text[len(MARK) :])] if text.startswith(MARK.decode()) else float(text)

    try:
        value = json.loads(rest, parse_float=number)
    except (ValueError, RecursionError):
        # Places in its message would be those of the rest.
        return None
    return value if isinstance(value, dict) else None


def _cut(data: bytes, last: int) -> tuple[bytes, list[NDArray[Any]]]:
    """The text with marks for arrays, and the arrays; no arrays if the text looks as if it had such marks itself."""
    from harts.data.readers.number_loops import DTYPES, FLOATS, find_arrays

    found, values = find_arrays(np.frombuffer(data, dtype=np.uint8), last, LEAST)
    pieces: list[bytes] = []
    arrays: list[NDArray[Any]] = []
    done = 0
    for begin, end, kind, start, stop in found.tolist():
        # Spaces, or a digit before the array would become part of the mark.
        pieces += [data[done:begin], b" %b%d " % (MARK, len(arrays))]
        arrays.append(values[start:stop].view(float if kind == FLOATS else int).astype(DTYPES[kind]))
        done = end
    pieces.append(data[done:])
    return (b"", []) if any(MARK in piece for piece in pieces[::2]) else (b"".join(pieces), arrays)
