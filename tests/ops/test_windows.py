"""What windows cover, counted one element at a time."""

import itertools

import numpy as np

from qjax.ops.windows import inside, product_of_axes


def test_elements_inside_are_those_of_a_plain_count():
    for size, places, window, stride, low, dilation in itertools.product(
        (1, 4), (1, 3), (1, 2), (1, 2), (0, 2), (1, 2)
    ):
        expected = [
            sum(0 <= place * stride - low + tap * dilation < size for tap in range(window)) for place in range(places)
        ]
        found = inside(size, places, window=window, stride=stride, low=low, dilation=dilation)
        assert np.array_equal(found, expected)


def test_counts_of_several_axes_multiply():
    found = product_of_axes([np.array([1, 2]), np.array([3, 4, 5])])
    assert np.array_equal(found, [[3, 4, 5], [6, 8, 10]])
    assert product_of_axes([]) == 1
