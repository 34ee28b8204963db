"""Fingerprints differ if a tensor differs in a single bit, sign or place."""

from __future__ import annotations

import itertools

import pytest
import torch

from composable_shard._torch import fingerprint as module
from composable_shard._torch.fingerprint import fingerprints


@pytest.fixture(params=["cpu", "device"])
def of(request):
    """The fingerprint of one tensor, as it is computed on the CPU or on a device."""
    if request.param == "cpu":
        return lambda tensor: fingerprints([tensor])[0]
    as_bytes = lambda tensor: tensor.contiguous().view(-1).view(torch.uint8)  # noqa: E731
    return lambda tensor: tuple(int(module._mixed(as_bytes(tensor), seed)) for seed in (0, 1))


def test_signs_of_any_two_numbers_matter(of):
    """A sum of numbers times odd factors misses these."""
    numbers = torch.randn(64, dtype=torch.float64)
    seen = {of(numbers)}
    for pair in itertools.combinations(range(64), 2):
        changed = numbers.clone()
        changed[list(pair)] *= -1
        seen.add(of(changed))
    assert len(seen) == 1 + 64 * 63 // 2


def test_every_bit_matters(of):
    data = torch.randint(0, 256, (40,), dtype=torch.uint8)
    seen = {of(data)}
    for place, bit in itertools.product(range(40), range(8)):
        changed = data.clone()
        changed[place] ^= 1 << bit
        seen.add(of(changed))
    assert len(seen) == 1 + 40 * 8


def test_places_and_lengths_matter(of):
    numbers = torch.arange(9.0)
    assert len({of(numbers[torch.tensor(order)]) for order in itertools.permutations(range(5))}) == 120
    assert len({of(torch.zeros(size, dtype=torch.uint8)) for size in range(40)}) == 40


def test_equal_values_have_equal_fingerprints(of):
    numbers = torch.randn(6, 10)
    assert of(numbers.t()) == of(numbers.t().contiguous())
    assert of(torch.cat([numbers.view(-1)[:1], numbers.view(-1)])[1:]) == of(numbers.view(-1))  # not aligned


def test_large_tensors_are_mixed_in_parts(of, monkeypatch):
    numbers = torch.arange(100.0)
    whole = of(numbers)
    monkeypatch.setattr(module, "_AT_ONCE", 7)
    assert of(numbers) == whole
