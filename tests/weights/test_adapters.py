"""Adapters are sent alone under peft's names, or merged into the weights with the bits of peft's own merge."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import composable_shard as cs
from _pool import distributed, more
from composable_shard import weights


class LoRALinear(nn.Module):
    """A linear layer with adapters whose attributes have the names that peft gives them."""

    def __init__(self, inputs, outputs, rank=2, transposed=False):
        super().__init__()
        self.base_layer = nn.Linear(outputs, inputs) if transposed else nn.Linear(inputs, outputs)
        self.lora_A = nn.ModuleDict({name: nn.Linear(inputs, rank, bias=False) for name in ("default", "other")})
        self.lora_B = nn.ModuleDict({name: nn.Linear(rank, outputs, bias=False) for name in ("default", "other")})
        self.scaling = {"default": 0.75, "other": 2.0}
        self.fan_in_fan_out = transposed

    def merge(self, adapter):
        """As peft's `merge_adapter`: the change is computed in float32 on a CPU, and added in place."""
        down, up = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        change = up.float() @ down.float()
        change = (change.t() if self.fan_in_fan_out else change) * self.scaling[adapter]
        self.base_layer.weight.data += change.to(up.dtype)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = LoRALinear(6, 13), LoRALinear(13, 6, transposed=True)
        self.norm = nn.LayerNorm(6)


class Wrapped(nn.Module):
    """What `get_peft_model` returns."""

    def __init__(self, dtypes):
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = Net()
        for name, param in self.named_parameters():
            param.data = param.data.to(dtypes["lora_" in name])


def whole_on(rank, values):
    """The layout of a rank that holds full tensors."""
    tensors = {name: weights.TensorInfo(tuple(each.shape), each.dtype) for name, each in values.items()}
    held = {}
    for name, (shape, dtype) in ((name, (each.shape, each.dtype)) for name, each in tensors.items()):
        start = (0,) * len(shape)
        held[name] = weights.LocalTensor(shape, dtype, (weights.Piece(name, weights.Box(start, shape), start),))
    return weights.WeightLayout(tensors, {}, {rank: held})


def received(model, like, **options):
    """Send a model from ranks 0 to 2, and return the tensors of rank 3, which holds them in full."""
    rank = dist.get_rank()
    own = weights.layout(model, **options) if rank < 3 else whole_on(3, like)
    plan = weights.plan_together(**{"sends" if rank < 3 else "receives": own})
    if rank < 3:
        weights.send(model, plan)
        return {}
    into = {name: torch.full_like(each, 7.0) for name, each in like.items()}
    weights.receive(plan, into)
    return into


DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]


@distributed(world=4)
@pytest.mark.parametrize("dtypes", [DTYPES[0], more(DTYPES[1]), DTYPES[2]])
def test_merged_weights_are_the_bits_of_a_merge_in_the_model(rank, world, dtypes):
    torch.manual_seed(0)
    model = Wrapped(dtypes)
    wanted = copy.deepcopy(model).base_model.model
    wanted.up.merge("default"), wanted.down.merge("default")
    expected = {
        name.replace(".base_layer", ""): value for name, value in wanted.state_dict().items() if "lora_" not in name
    }
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mesh = DeviceMesh("cpu", [0, 1, 2])  # made on all ranks, because torch counts process groups
    if rank < 3:
        cs.fully_shard(model.base_model.model, mesh=mesh)
    found = received(model, expected, merge="default")
    if rank == 3:
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[name], each) for name, each in expected.items())
    else:
        assert all(torch.equal(value.full_tensor(), before[name]) for name, value in model.state_dict().items())
    names = [f"base_model.model.{layer}.lora_{part}" for layer in ("up", "down") for part in "AB"]
    alone = {f"{name}.weight": before[f"{name}.default.weight"] for name in names}
    found = received(model, alone, adapter="default")
    if rank == 3:
        assert all(torch.equal(found[name], each) for name, each in alone.items())


@distributed(world=4)
def test_an_adapter_is_merged_into_weights_that_are_sharded_in_two_ways(rank, world):
    torch.manual_seed(0)
    model = Wrapped(DTYPES[0])
    net, wanted = model.base_model.model, copy.deepcopy(model).base_model.model
    wanted.up.merge("default")
    expected = {"up.weight": wanted.up.base_layer.weight.detach()}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(net.up, mesh["tensor"], {"base_layer": ColwiseParallel()})  # 13 rows: 7 and 6, then in halves
    cs.fully_shard(net, mesh=mesh["data"])
    own = weights.layout(model, merge="default")
    wants = {"receives": whole_on(3, expected)} if rank == 3 else {}
    plan = weights.plan_together(sends=own, **wants, unused=["up.bias", "down.*", "norm.*"])
    into = {name: torch.full_like(each, 7.0) for name, each in expected.items()}
    weights.send(model, plan, into=into if rank == 3 else None)
    assert rank < 3 or torch.equal(into["up.weight"], expected["up.weight"])


def problem_of(model, error, **options):
    with pytest.raises(error) as caught:
        weights.layout(model, **options)
    return str(caught.value)


def test_adapters_of_other_kinds_are_refused_by_name():
    model = Wrapped((torch.float32, torch.float32))
    value, unsupported = cs.errors.ShardConfigValueError, cs.errors.ShardConfigUnsupportedError
    assert "no weight of the model has an adapter called 'third'" in problem_of(model, value, merge="third")
    assert "no tensor of an adapter called 'third'" in problem_of(model, value, adapter="third")
    assert "cannot be combined" in problem_of(model, value, adapter="default", merge="default")
    up, down = model.base_model.model.up, model.base_model.model.down
    up.lora_magnitude_vector = {"default": 1}
    assert "base_model.model.up (lora_magnitude_vector)" in problem_of(model, unsupported, merge="default")
    del up.lora_magnitude_vector
    up.lora_B["default"].bias, up.merged_adapters = nn.Parameter(torch.zeros(13)), ["other"]
    assert "base_model.model.up (lora_bias)" in problem_of(model, unsupported, merge="default")
    up.lora_B["default"].bias = None
    up.merged_adapters = ["default"]
    assert "base_model.model.up (is merged already)" in problem_of(model, unsupported, merge="default")
    up.merged_adapters = []
    del down.lora_A, down.lora_B
    assert "base_model.model.down (LoRALinear)" in problem_of(model, unsupported, merge="default")


def test_adapters_of_tied_weights_and_of_other_parameters_are_refused():
    model = Wrapped((torch.float32, torch.float32))
    net = model.base_model.model
    net.head = nn.Linear(6, 13)
    net.head.weight = net.up.base_layer.weight
    unsupported = cs.errors.ShardConfigUnsupportedError
    assert "up.base_layer.weight tied to other weights" in problem_of(model, unsupported, merge="default")
    del net.head
    net.up.parameter_name = "gate_up_proj"  # as peft's wrapper of a parameter that is not a linear layer's
    assert "base_model.model.up (LoRALinear)" in problem_of(model, unsupported, merge="default")


def test_modules_that_an_adapter_replaces_are_sent_under_their_own_name():
    model = nn.ModuleDict({"base_model": nn.ModuleDict({"model": nn.ModuleDict({"layer": LoRALinear(4, 4)})})})
    head = nn.Module()
    head.original_module = nn.Linear(4, 2)
    head.modules_to_save = nn.ModuleDict({"default": nn.Linear(4, 2), "other": nn.Linear(4, 2)})
    model["base_model"]["model"]["head"] = head
    layout = weights.layout(model, merge="default")
    assert [*layout.tensors] == ["head.bias", "head.weight", "layer.bias", "layer.weight"]
    assert "base_model.model.head.modules_to_save.default.weight" in layout.ranks[0]
    assert layout.merges == weights.WeightLayout.from_json(layout.to_json()).merges == "default"
