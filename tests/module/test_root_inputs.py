"""The root moves the inputs of its forward to its accelerator, as torch's FSDP2 does; other modules leave them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import composable_shard as cs
from composable_shard import testing
from composable_shard._module.module import STATE


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = None

    def forward(self, x, also):
        self.seen = [x.device.type, also["mask"][0].device.type]
        return self.linear(torch.ones(2, 4, device=self.linear.weight.device))


class Outer(Inner):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x, also):
        return super().forward(x, also) + self.inner(torch.ones(2, 4), {"mask": [torch.ones(2)]})


def sharded(shard=cs.fully_shard):
    model = Outer()
    shard(model.inner)
    return shard(model)


def batch():
    return torch.ones(2, 4), {"mask": [torch.ones(2)], "note": "kept"}


def test_the_root_moves_tensors_in_its_arguments_to_its_device_and_no_other_module_does():
    with testing.fake(2):
        model = sharded()
        model(*batch())
        assert (model.seen, model.inner.seen) == (["cpu", "cpu"], ["cpu", "cpu"])
        assert model.__dict__[STATE].inputs_to is None  # nothing to move to
        model.__dict__[STATE].inputs_to = torch.device("meta")  # stands in for an accelerator
        x, also = batch()
        model(x, also=also).sum().backward()
    assert model.seen == ["meta", "meta"]
    assert model.inner.seen == ["cpu", "cpu"]
    assert (x.device.type, also["mask"][0].device.type) == ("cpu", "cpu")  # the caller's own are left alone


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: there is no device to move inputs to")
@pytest.mark.parametrize("shard", [cs.fully_shard, torch_fully_shard])
def test_a_batch_on_the_host_reaches_a_root_on_a_card(shard):
    with testing.fake(2, device="cuda"):
        model = Outer().cuda()
        shard(model.inner)
        shard(model)
        model(*batch())
    assert model.seen == ["cuda", "cuda"]
