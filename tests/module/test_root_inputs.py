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


def test_where_nothing_is_to_be_moved_forward_gets_the_containers_of_the_caller():
    class Notes(nn.Linear):
        def forward(self, x, notes):
            notes.append("seen")
            return super().forward(x)

    with testing.fake(2):
        model = cs.fully_shard(Notes(4, 4))
        notes = []
        model(torch.ones(2, 4), notes)
        model.__dict__[STATE].inputs_to = torch.device("cpu")  # stands in for an accelerator on which all is
        model(torch.ones(2, 4), notes)
    assert notes == ["seen", "seen"]


def test_a_module_that_was_a_root_for_an_unshard_alone_moves_nothing_once_another_one_is():
    with testing.fake(2):
        model = sharded()
        model.inner.unshard()
        model.inner.reshard()
        model.inner.__dict__[STATE].inputs_to = torch.device("meta")  # as on an accelerator: it was its own root
        model(*batch())
        assert model.inner.__dict__[STATE].inputs_to is None
    assert model.inner.seen == ["cpu", "cpu"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: there is no device to move inputs to")
@pytest.mark.parametrize("shard", [cs.fully_shard, torch_fully_shard])
def test_a_batch_on_the_host_reaches_a_root_on_a_card(shard):
    with testing.fake(2, device="cuda"):
        model = Outer().cuda()
        shard(model.inner)
        shard(model)
        model(*batch())
    assert model.seen == ["cuda", "cuda"]
