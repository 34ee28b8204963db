"""The most bytes that live at once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from composable_shard._arena import Lifetime, peak_bytes

STEPS = 12
LIVES = st.lists(
    st.builds(
        lambda nbytes, opened, steps: Lifetime("buffer", nbytes, opened, opened + steps),
        st.integers(0, 100),
        st.integers(0, STEPS),
        st.integers(0, STEPS),
    ),
    max_size=12,
)


@settings(deadline=None, derandomize=True)
@given(LIVES)
def test_the_peak_is_the_largest_sum_over_all_steps(lives):
    sums = [sum(x.nbytes for x in lives if x.opened <= step < x.closed) for step in range(2 * STEPS)]
    assert peak_bytes(lives) == max(sums)


def test_a_buffer_that_opens_when_another_closes_takes_its_place():
    assert peak_bytes([Lifetime("a", 10, 0, 2), Lifetime("b", 7, 2, 4)]) == 10


def test_no_buffers_take_no_bytes():
    assert peak_bytes([]) == 0
