"""Streams arrive with every bit, in no more bytes than they need."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from harts.data.stream_formats import StreamFormat, needs_float64, stream_facts

FLOATS = st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.floats(width=32, allow_nan=False))


def format_of(*ranks: list[NDArray[np.float64]], even_zeros: bool = False) -> StreamFormat:
    return StreamFormat.of(np.stack([stream_facts(values, even_zeros=even_zeros) for values in ranks]))


@given(
    st.lists(st.lists(FLOATS, max_size=4), max_size=4),
    st.lists(st.tuples(FLOATS, st.integers(0, 4)), max_size=4),
    st.booleans(),
)
def test_every_bit_arrives(free: list[list[float]], constant: list[tuple[float, int]], even_zeros: bool):
    """Of trajectories with any values on one rank, and with one value each on another; signs of zeros too."""
    ranks = [[np.array(v, dtype=np.float64) for v in free], [np.full(n, v) for v, n in constant]]
    form = format_of(*ranks, even_zeros=even_zeros)
    for values in filter(None, ranks):
        count_N = np.array([some.size for some in values])
        sent = form.write(values) if form.is_sent else np.zeros(0)
        assert sent.size == form.sizes(count_N).sum()
        if form.is_sent:
            for some, came in zip(values, form.read(sent, count_N), strict=True):
                full = np.empty(some.size)
                full[:] = came
                assert full.tobytes() == some.tobytes()
        else:
            assert not np.concatenate(values).any()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], (False, False, False)),
        ([[0.0, 0.0], []], (False, False, False)),
        ([[0.5, 0.5], [], [2.0]], (True, False, False)),
        ([[0.5, 0.5], [0.1]], (True, False, True)),
        ([[0.5, 0.25]], (True, True, False)),
        ([[0.0, -0.0]], (True, True, False)),
        ([[1e300]], (True, False, True)),
        ([[1e-50]], (True, False, True)),
    ],
)
def test_no_more_is_sent_than_needed(values: list[list[float]], expected: tuple[bool, bool, bool]):
    form = format_of([np.array(some, dtype=np.float64) for some in values])
    assert (form.is_sent, form.varies, form.is_wide) == expected


def test_the_neediest_rank_decides():
    ranks = ([np.full(3, 0.1)], [np.array([1.0, 2.0], dtype=np.float32)], [])
    assert format_of(*ranks) == StreamFormat(is_sent=True, varies=True, is_wide=True)
    assert format_of(*ranks[1:]).dtype == np.float32


def test_zeros_are_not_a_missing_stream():
    assert format_of([np.zeros(2)], even_zeros=True).is_sent
    assert not format_of([], even_zeros=True).is_sent


def test_infinite_values_fit_both():
    assert not needs_float64(np.array([np.inf, -np.inf, 0.5]))
