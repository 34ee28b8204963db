"""A sharded model can be moved and converted like any module, in every way that torch supports."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

import composable_shard as cs
from _models import Stack, shard_blocks
from _pool import distributed
from _sides import assert_alike, both, models_of, noise, optimizers_of, train_alike
from _stepping import assert_at_rest, engine_of


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.conv(x))).mean((2, 3)))


CONVERSIONS = {
    "to a dtype": lambda model: model.to(torch.float64),
    "to a device": lambda model: model.to("cpu"),
    "to a device and a dtype": lambda model: model.to(torch.device("cpu"), torch.float64, non_blocking=True),
    "like a tensor": lambda model: model.to(torch.zeros(1, dtype=torch.float64)),
    "to a memory format": lambda model: model.to(memory_format=torch.channels_last),
    "double": lambda model: model.double(),
    "double and back": lambda model: model.double().float(),
    "cpu": lambda model: model.cpu(),
    "type": lambda model: model.type(torch.float64),
    "requires_grad": lambda model: model.requires_grad_(False).requires_grad_(True),
    "a part alone": lambda model: (model.head.double(), model.head.float()),
    "eval and train": lambda model: model.eval().train(),
}


@contextlib.contextmanager
def converted_by(way):
    """Choose how torch converts parameters in the body: in place, by replacing them, or by swapping them."""
    future = torch.__future__
    before = future.get_overwrite_module_params_on_conversion(), future.get_swap_module_params_on_conversion()
    future.set_overwrite_module_params_on_conversion(way == "overwrite")
    future.set_swap_module_params_on_conversion(way == "swap")
    try:
        yield
    finally:
        future.set_overwrite_module_params_on_conversion(before[0])
        future.set_swap_module_params_on_conversion(before[1])


def step(models, number):
    for model in models.values():
        model.zero_grad()
        dtype = next(model.parameters()).dtype
        model(noise(2, 3, 5, 5, seed=number).to(dtype)).square().mean().backward()


def train(models, steps=2):
    optimizers = optimizers_of(models)  # created after a conversion, as for any module
    for number in range(steps):
        step(models, number)
        assert_alike(models, exact=False)
        for optimizer in optimizers.values():
            optimizer.step()


@pytest.mark.parametrize(
    ("conversion", "way"),
    [
        *[(conversion, "in place") for conversion in CONVERSIONS],
        *[(conversion, way) for conversion in ("to a dtype", "double and back") for way in ("overwrite", "swap")],
    ],
)
@distributed(world=2)
def test_training_after_a_conversion_is_exact(rank, world, conversion, way):
    # torch's FSDP2 supports only in-place conversions, and no conversion to a memory format.
    models = models_of(Conv, fsdp2=way == "in place" and conversion != "to a memory format")
    convert = CONVERSIONS[conversion]
    for moment in ("before the first forward", "between steps", "while unsharded"):
        if moment == "while unsharded":
            if conversion in ("requires_grad", "eval and train"):
                return  # the model stays unsharded, with other parameters
            models["ours"].head.unshard()
        with converted_by(way):
            for model in models.values():
                convert(model)
        train(models)
        assert_at_rest(models["ours"])


@pytest.mark.parametrize("conversion", ["cpu", "to a dtype"])
@distributed(world=2)
def test_a_conversion_frees_the_memory_of_the_pool(rank, world, conversion):
    models = models_of(Conv)
    train(models)
    engine = engine_of(models["ours"])
    assert engine.pool.held_bytes > 0
    CONVERSIONS[conversion](models["ours"])
    assert engine.pool.held_bytes == 0
    buckets = [bucket for group in engine.groups for bucket in group.buckets]
    assert not any(bucket._gatherer._seen or bucket._faces._of or bucket._faces.leaves for bucket in buckets), (
        "views of the freed memory"
    )


@distributed(world=2)
def test_a_conversion_between_forward_and_backward_is_an_error(rank, world):
    models = models_of(Conv, fsdp2=False)
    train(models)
    loss = models["ours"](noise(2, 3, 5, 5)).square().mean()
    models["ours"].double()
    with pytest.raises(RuntimeError):
        loss.backward()
    for model in models.values():
        model.zero_grad()
    models["plain"].double()
    models["plain"].load_state_dict(
        {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in models["ours"].state_dict().items()}
    )
    train(models)


@distributed(world=2)
def test_a_model_that_was_moved_to_meta_can_be_materialised_again(rank, world):
    models = models_of(Conv, fsdp2=False)
    train(models)
    state = {name: value.clone() for name, value in models["ours"].state_dict().items()}
    models["ours"].to("meta")
    with pytest.raises(RuntimeError, match="meta"):
        models["ours"](noise(2, 3, 5, 5))
    models["ours"].to_empty(device="cpu")
    models["ours"].load_state_dict(state)
    train(models)


GIVEN = {
    "sharded": lambda weight: weight.data * 2,
    "of another dtype": lambda weight: weight.data.double(),
    "whole": lambda weight: torch.zeros(weight.shape),
}


@pytest.mark.parametrize("given", GIVEN)
@distributed(world=2)
def test_assigned_data_is_detected_where_fsdp2_ignores_it(rank, world, given):
    for name, model in both().items():
        x = torch.ones(2, 4)
        with torch.no_grad():
            output = model(x)
        weight = model.blocks[1].up.weight
        old = weight.full_tensor().clone()
        weight.data = GIVEN[given](weight)
        if name == "fsdp2":
            assert given == "of another dtype" or torch.equal(model(x), output), "FSDP2 has used the assigned data"
            continue
        what = r"parameter blocks.1.up.weight: its .data was assigned"
        if given == "sharded":
            with pytest.warns(UserWarning, match=what):
                assert torch.equal(model(x), output)
        for _ in range(2):
            refused = pytest.raises(cs.errors.ShardConfigStateError, match=what)
            with contextlib.nullcontext() if given == "sharded" else refused:
                model(x)
        assert torch.equal(weight.to_local(), old.chunk(world)[rank])


@pytest.mark.parametrize("copied", [False, True])
@distributed(world=2)
def test_data_assigned_before_the_first_forward_is_detected(rank, world, copied):
    model = both()["ours"]
    model = copy.deepcopy(model) if copied else model
    state = model.state_dict()
    model.load_state_dict({name: value.full_tensor() for name, value in state.items()})
    weight = model.blocks[1].up.weight
    weight.data = torch.zeros(weight.shape)
    with pytest.raises(cs.errors.ShardConfigStateError, match=r"parameter blocks.1.up.weight: its .data was assigned"):
        model(torch.ones(2, 4))


@distributed(world=2)
def test_other_ways_to_change_parameters_do_not_count_as_assigned_data(rank, world):
    models = {"plain": Stack(), "ours": Stack()}
    models["ours"].load_state_dict(models["plain"].state_dict())
    shard_blocks(models["ours"], cs.fully_shard)
    x, outputs = torch.ones(2, 4), {}
    for name, model in models.items():
        with torch.no_grad():
            model(x)
            for param in model.parameters():
                param.data.mul_(2)
                param.data.copy_(param.data * 2)
            model(x)
            weight = model.blocks[1].up.weight
            model.blocks[1].up.weight = nn.Parameter(weight.detach())  # with the same local tensor
            model(x)
            bias = model.blocks[1].up.bias
            torch.utils.swap_tensors(bias, nn.Parameter(bias.detach() / 2))
            model(x)
            model.double()
            outputs[name] = model(x.double())
    torch.testing.assert_close(outputs["ours"], outputs["plain"])


@distributed(world=2)
def test_shards_can_move_to_shared_memory(rank, world):
    models = models_of(Stack, shard_blocks, fsdp2=False)
    for model in models.values():
        with torch.no_grad():
            model(noise(2, 4))
        assert model.share_memory() is model
    assert all(param.to_local().is_shared() for param in models["ours"].parameters())
    train_alike(models, lambda model, step: model(noise(3, 4, seed=step)).square().mean())
