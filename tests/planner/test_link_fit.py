"""A link is recovered from the times of its messages."""

from __future__ import annotations

import random

import pytest

from composable_shard.errors import ShardConfigValueError
from composable_shard.planner import Link
from composable_shard.planner.link_fit import fit_link, sent

SIZES = [2.0**power for power in range(13, 27)]


def times(link, noise=0.0):
    chance = random.Random(0)
    return [(link.latency + size / link.bandwidth) * (1 + chance.uniform(-noise, noise)) for size in SIZES]


@pytest.mark.parametrize("link", [Link(1.5e9, 3e-4), Link(4e11, 1.2e-5), Link(2e8, 0.0)])
def test_exact_times_recover_the_link(link):
    fit = fit_link(SIZES, times(link))
    assert fit.link.bandwidth == pytest.approx(link.bandwidth, rel=1e-6)
    assert fit.link.latency == pytest.approx(link.latency, rel=1e-6, abs=1e-12)
    assert fit.error < 1e-6


def test_small_messages_count_as_much_as_large_ones():
    """Least squares of absolute errors would miss the latency, which is a thousandth of the longest time."""
    link = Link(1.5e9, 4e-5)
    fit = fit_link(SIZES, times(link, noise=0.1))
    assert fit.link.latency == pytest.approx(link.latency, rel=0.1)
    assert fit.link.bandwidth == pytest.approx(link.bandwidth, rel=0.1)
    assert 0.01 < fit.error < 0.2


def test_a_latency_is_never_negative():
    exact = times(Link(1e9, 0.0))
    seconds = [0.7 * exact[0], *exact[1:]]  # the smallest message is faster than the bandwidth
    fit = fit_link(SIZES, seconds)
    assert fit.link.latency == 0
    assert 1e9 < fit.link.bandwidth < 1.2e9


def test_times_that_fall_with_the_size_still_give_a_link():
    fit = fit_link([1e3, 1e6], [2e-3, 1e-3])
    assert fit.link.latency == 0
    assert fit.link.bandwidth > 0


def test_a_rank_sends_its_part_to_every_other_rank():
    assert sent(800, 2) == 400
    assert sent(800, 8) == 700


@pytest.mark.parametrize(
    ("amounts", "seconds"),
    [([1.0, 1.0], [1.0, 1.0]), ([1.0, 2.0], [1.0]), ([1.0, 2.0], [1.0, 0.0]), ([0.0, 2.0], [1.0, 1.0])],
)
def test_invalid_times_are_refused(amounts, seconds):
    with pytest.raises(ShardConfigValueError, match="fit_link: expected"):
        fit_link(amounts, seconds)
