"""Which rows a strip needs, against the definition of the operation, for maps of any height."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hydra_ext.tiled.geometry import BackwardStrip, Rows, TransposedWindow, Window, strips

SHAPES = st.tuples(
    st.integers(1, 40),  # height
    st.integers(1, 7),  # kernel
    st.integers(1, 3),  # dilation
    st.integers(1, 6),  # stride
    st.integers(0, 8),  # padding
    st.sampled_from([1, 1, 5, 20]),  # least rows
)


def holds(rows: Rows, row: int) -> bool:
    return rows.begin <= row < rows.end


def assert_partition(calls: list[BackwardStrip], outputs: int) -> None:
    """Every output is some strip's own, once, and was loaded there."""
    seen = 0
    for call in calls:
        assert call.own_output.begin == seen
        seen = call.own_output.end
        assert call.own_output.count == 0 or (
            call.output.begin <= call.own_output.begin and call.own_output.end <= call.output.end
        )
    assert seen == outputs


def assert_at_most(rows: tuple[int, int], most: tuple[int, int]) -> None:
    assert rows[0] <= most[0]
    assert rows[1] <= most[1]


@settings(deadline=None)
@given(SHAPES, st.integers(1, 9))
def test_windows_load_what_they_reach(shape: tuple[int, ...], rows: int) -> None:
    height, kernel, dilation, stride, padding, least = shape
    reach = dilation * (kernel - 1)
    assume(height + 2 * padding > reach)
    window = Window.of_convolution(height=height, reach=reach, stride=stride, padding=padding, least=least)
    outputs = window.outputs(height)
    for wanted in strips(outputs, rows):
        strip = window.forward(wanted)
        assert 0 <= strip.load.begin < strip.load.end <= height
        assert strip.load.begin % stride == 0
        assert (height - strip.load.end) % stride == 0
        assert strip.load.count >= min(least, height)
        assert strip.result.begin <= wanted.begin < wanted.end <= strip.result.end
        for source in (
            o * stride - padding + dilation * j for o in range(wanted.begin, wanted.end) for j in range(kernel)
        ):
            assert not 0 <= source < height or holds(strip.load, source)
        assert_at_most((strip.load.count, strip.result.count), window.forward_most(wanted.count))
    calls = [window.backward(own) for own in strips(height, rows)]
    assert_partition(calls, outputs)
    for call in calls:
        assert_at_most((call.input.count, call.output.count), window.backward_most(call.own.count))
        assert 0 <= call.input.begin <= call.own.begin < call.own.end <= call.input.end <= height
        assert call.input.begin % stride == (height - call.input.end) % stride == 0
        assert 0 <= call.output.begin < call.output.end <= outputs
        for row in range(call.own.begin, call.own.end):
            for output, rest in (divmod(row + padding - dilation * j, stride) for j in range(kernel)):
                assert rest or not 0 <= output < outputs or holds(call.output, output)


@settings(deadline=None)
@given(SHAPES, st.integers(0, 5), st.integers(1, 9))
def test_transposed_windows_load_what_reaches_them(shape: tuple[int, ...], extra: int, rows: int) -> None:
    height, kernel, dilation, stride, padding, least = shape
    assume(extra < max(stride, dilation))
    window = TransposedWindow(height, dilation * (kernel - 1), stride, padding, extra, least)
    outputs = window.outputs(height)
    assume(outputs > 0)
    for wanted in strips(outputs, rows):
        strip = window.forward(wanted)
        assert 0 <= strip.load.begin < strip.load.end <= height
        assert strip.result.begin <= wanted.begin < wanted.end <= strip.result.end
        for row in range(wanted.begin, wanted.end):
            for source, rest in (divmod(row + padding - dilation * j, stride) for j in range(kernel)):
                assert rest or not 0 <= source < height or holds(strip.load, source)
        assert_at_most((strip.load.count, strip.result.count), window.forward_most(wanted.count))
    calls = [window.backward(own) for own in strips(height, rows)]
    assert_partition(calls, outputs)
    for call in calls:
        assert_at_most((call.input.count, call.output.count), window.backward_most(call.own.count))
        assert 0 <= call.input.begin <= call.own.begin < call.own.end <= call.input.end <= height
        assert 0 <= call.output.begin < call.output.end <= outputs
        for row in range(call.own.begin, call.own.end):
            for output in (row * stride - padding + dilation * j for j in range(kernel)):
                assert not 0 <= output < outputs or holds(call.output, output)


@pytest.mark.parametrize("rows", [1, 10])
def test_halos_are_reckoned_on_the_side_that_they_are_on(rows: int) -> None:
    shape = {"height": 10_000, "reach": 6, "stride": 4, "padding": 3}
    windows = Window.of_convolution(**shape), TransposedWindow(*shape.values(), extra=3)
    # A row of the smaller map is four of the larger one; 6 rows of reach, and 3 to begin at a multiple of 4.
    assert windows[0].forward_most(rows) == (4 * rows + 9, rows + 3)
    assert windows[0].backward_most(4 * rows) == (4 * rows + 18, rows + 5)
    assert windows[1].forward_most(4 * rows) == (rows + 4, 4 * rows + 16)
    assert windows[1].backward_most(rows) == (rows + 3, 4 * rows + 12)


def test_rows_of_a_map_beyond_32_bits() -> None:
    window = Window.of_convolution(height=2**40, reach=6, stride=4, padding=3)
    strip = window.forward(Rows(2**37, 2**37 + 2))
    assert strip.load == Rows(2**39 - 4, 2**39 + 8)
    assert strip.keep.within(strip.result) == Rows(1, 3)
