"""Only the root moves the inputs of its forward to its accelerator, like torch's FSDP2."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import composable_shard as cs
from composable_shard import testing
from composable_shard._module.state import STATE


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


def test_only_the_root_moves_its_inputs_to_its_device():
    with testing.fake(2):
        model = sharded()
        model(*batch())
        assert (model.seen, model.inner.seen) == (["cpu", "cpu"], ["cpu", "cpu"])
        assert model.__dict__[STATE].inputs_to is None  # no accelerator
        model.__dict__[STATE].inputs_to = torch.device("meta")  # instead of an accelerator
        x, also = batch()
        model(x, also=also).sum().backward()
    assert model.seen == ["meta", "meta"]
    assert model.inner.seen == ["cpu", "cpu"]
    assert (x.device.type, also["mask"][0].device.type) == ("cpu", "cpu")  # the caller's inputs do not change


def test_containers_without_tensors_to_move_are_not_copied():
    class Notes(nn.Linear):
        def forward(self, x, notes):
            notes.append("seen")
            return super().forward(x)

    with testing.fake(2):
        model = cs.fully_shard(Notes(4, 4))
        notes = []
        model(torch.ones(2, 4), notes)
        model.__dict__[STATE].inputs_to = torch.device("cpu")  # instead of an accelerator with all inputs on it
        model(torch.ones(2, 4), notes)
    assert notes == ["seen", "seen"]


def test_a_temporary_root_moves_no_inputs_later():
    with testing.fake(2):
        model = sharded()
        model.inner.unshard()
        model.inner.reshard()
        model.inner.__dict__[STATE].inputs_to = torch.device("meta")  # as on an accelerator, when it was a root
        model(*batch())
        assert model.inner.__dict__[STATE].inputs_to is None
    assert model.inner.seen == ["cpu", "cpu"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: there is no device to move inputs to")
@pytest.mark.parametrize("shard", [cs.fully_shard, torch_fully_shard])
def test_the_root_moves_a_batch_from_the_host_to_the_gpu(shard):
    with testing.fake(2, device="cuda"):
        model = Outer().cuda()
        shard(model.inner)
        shard(model)
        model(*batch())
    assert model.seen == ["cuda", "cuda"]
