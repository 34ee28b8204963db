"""`clip_grad_norm_` over sharded gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from contract._ways import REAL, contract


def layers(dim=8):
    return nn.Sequential(nn.Linear(dim, 5), nn.ReLU(), nn.Linear(5, 3), nn.Linear(3, 1))


@contract(ways=REAL, world=4)
@pytest.mark.parametrize(("norm", "shape"), [(2, (4,)), (2, (2, 2)), (1, (4,)), (float("inf"), (2, 2))])
def test_the_norm_is_the_norm_of_the_full_gradients(t, norm, shape):
    # uneven, but empty on no rank: torch cannot compute the maximum of an empty tensor
    plain, model = t.pair(lambda: nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 4)))
    t.shard(model, t.mesh(*shape))
    for step in range(2):
        for each in (plain, model):
            each.zero_grad()
            each(10 * t.randn(4, 8, step=step)).sum().backward()
        t.average_grads(plain)
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type=norm)
        found = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=norm)
        assert isinstance(found, DTensor)
        assert found.dim() == 0
        t.same(found, expected, rtol=1e-5, atol=1e-5)
        t.same_params(model, plain)
        assert expected > 0.5


@contract()
def test_a_large_max_norm_changes_nothing_and_separate_calls_clip_alike(t):
    plain, model = t.pair(layers)
    t.shard(model, t.mesh())
    for each in (plain, model):
        each(t.randn(4, 8)).sum().backward()
    t.average_grads(plain)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    t.same_params(model, plain)
    total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    torch.nn.utils.clip_grads_with_norm_(list(model.parameters()), 0.1, total)
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    t.same_params(model, plain)


@contract(ways=REAL)
def test_error_if_nonfinite_detects_infinite_gradients(t):
    model = t.shard(t.build(layers), t.mesh())
    (model(t.randn(4, 8)) * (float("inf") if t.rank == 0 else 1.0)).sum().backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


@contract()
def test_clip_grad_value(t):
    plain, model = t.pair(layers)
    t.shard(model, t.mesh())
    for each in (plain, model):
        each(10 * t.randn(4, 8)).sum().backward()
    t.average_grads(plain)
    for each in (plain, model):
        torch.nn.utils.clip_grad_value_(each.parameters(), 0.01)
    t.same_params(model, plain)
