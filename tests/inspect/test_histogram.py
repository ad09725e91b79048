"""Histograms against sorted lists."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.inspect.histogram import Histogram


def histogram_of(values: list[int]) -> Histogram:
    histogram = Histogram()
    for part in np.array_split(np.array(values, dtype=np.int64), 3):
        histogram.add(part)
    return histogram


@settings(deadline=None)
@given(st.lists(st.one_of(st.integers(0, 3000), st.integers(0, 2**62)), min_size=1), st.floats(0, 1))
def test_quantiles_are_exact_below_1024_and_close_above(values, share):
    exact = sorted(values)[max(1, math.ceil(share * len(values))) - 1]
    (found,) = histogram_of(values).quantiles((share,))
    assert found <= exact
    assert exact - found <= (0 if exact < 1024 else exact / 512)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**40), min_size=1))
def test_octaves_count_every_value_once(values):
    octaves = histogram_of(values).octaves()
    assert [count for _, count in octaves] == [sum(low <= v < max(2 * low, 1) for v in values) for low, _ in octaves]
    assert sum(count for _, count in octaves) == len(values) == histogram_of(values).total


def test_an_empty_histogram_has_no_octaves():
    assert (Histogram().octaves(), Histogram().quantiles((0.5,))) == ([], [0])
