"""Packed parameters are saved, loaded, exported and changed bit for bit, with their attributes."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import composable_shard as cs
from _packed import Packed4, Packed4Linear, Quantized, batch, bits, numbers, packed, shard
from _pool import distributed, simulated
from composable_shard import checkpoint
from composable_shard.errors import CheckpointError

FLOATS = [torch.bfloat16, torch.float32]


def made(storage=torch.bfloat16, seed=3, sharded=True, choose=None):
    torch.manual_seed(seed)
    model = Quantized(partial(Packed4Linear, storage=storage))
    if sharded:
        shard(model, cs.fully_shard, shard_placement_fn=choose)
    return model


def weights(model):
    return {name: p for name, p in model.named_parameters() if hasattr(p, "scales")}


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "run")


def ragged(param):
    return cs.Ragged(5)


@pytest.mark.parametrize(("storage", "choose"), [*((storage, None) for storage in FLOATS), (torch.bfloat16, ragged)])
@distributed(world=2)
def test_a_checkpoint_keeps_the_bits_of_packed_weights_and_their_scales(rank, world, storage, choose, folder):
    model = made(storage, choose=choose)
    checkpoint.save(folder, {"model": model}, step=1)
    other = made(storage, seed=4, choose=choose)
    with torch.no_grad():
        for weight in weights(other).values():
            weight.to_local().view(torch.uint8).zero_()
    checkpoint.load(folder, {"model": other})
    plain = made(storage, sharded=False)
    for name, weight in weights(other).items():
        assert torch.equal(bits(weight.full_tensor()), bits(plain.get_parameter(name))), name
    assert torch.equal(other(batch(0)), model(batch(0)))


@distributed(world=2)
def test_a_load_names_attributes_of_packed_weights_that_it_cannot_restore(rank, world, folder):
    model = made()
    model.blocks[0].first.base.weight.scales.offset = 0.5
    checkpoint.save(folder, {"model": model}, step=1)
    with pytest.raises(CheckpointError, match=r"blocks\.0\.first\.base\.weight\.offset: the module did not load"):
        checkpoint.load(folder, {"model": made()})


@pytest.mark.parametrize(("storage", "choose"), [*((storage, None) for storage in FLOATS), (torch.bfloat16, ragged)])
@simulated(world=2)
def test_a_cast_of_the_full_state_skips_packed_weights_and_scales(rank, world, storage, choose):
    model, plain = made(storage, choose=choose), made(storage, sharded=False).state_dict()
    full = cs.checkpoint.full_state_dict(model, rank0_only=False, dtype=torch.float16)
    streamed = dict(cs.checkpoint.iter_full_state(model, dtype=torch.float16))
    assert full.keys() == plain.keys() == streamed.keys()
    for name, value in full.items():
        if ".base." in name or "blocks.1.first" in name or "blocks.1.second" in name:
            assert torch.equal(bits(value), bits(plain[name])), name
        else:
            assert torch.equal(value, plain[name].half()), name
        assert torch.equal(bits(value), bits(streamed[name])), name


@distributed(world=2)
def test_an_export_in_another_dtype_keeps_the_bits_of_packed_weights(rank, world, folder):
    safetensors = pytest.importorskip("safetensors.torch")
    checkpoint.export_safetensors(folder, made(torch.float32), dtype=torch.bfloat16)
    plain, files = made(torch.float32, sharded=False), safetensors.load_file(f"{folder}/model.safetensors")
    for name, weight in weights(plain).items():
        assert torch.equal(bits(files[name]), bits(weight)), name
    assert files["head.weight"].dtype is torch.bfloat16
    other = made(torch.float32, seed=3)
    checkpoint.import_safetensors(folder, other, cast=True)


@pytest.mark.parametrize("choose", [None, ragged])
@simulated(world=2)
def test_full_parameters_have_their_class_and_can_be_quantized_again(rank, world, choose):
    model, plain = made(torch.uint8, choose=choose), made(torch.uint8, sharded=False)

    def merge(weight):
        return Packed4(*packed(numbers(weight, weight.scales) * 1.5 + 0.01, torch.uint8))

    with cs.checkpoint.full_parameters(model):
        base = model.blocks[0].first.base
        assert type(base.weight) is Packed4
        assert base.weight.kind == "four bits"
        base.weight = merge(base.weight)
    plain.blocks[0].first.base.weight = merge(plain.blocks[0].first.base.weight)
    assert torch.equal(model(batch(0)), plain(batch(0)))
