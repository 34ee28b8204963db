"""Content of states: state dicts of optimizers, wrapped models and models on meta, names, and devices."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Shard

import composable_shard as cs
from _pool import distributed
from composable_shard import checkpoint, testing
from composable_shard._torch.distributed import strided_shard
from composable_shard.checkpoint._format.boxes import parts_of

needs_accelerator = pytest.mark.skipif(
    not torch.accelerator.is_available(), reason="no accelerator: all loaded tensors are on the CPU"
)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(model, optimizer):
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_same(one, two):
    """Check that nested states are bitwise identical."""
    assert type(one) is type(two)
    if isinstance(one, torch.Tensor):
        assert one.dtype == two.dtype
        assert torch.equal(one, two)
    elif isinstance(one, dict):
        assert one.keys() == two.keys()
        for name, value in one.items():
            assert_same(value, two[name])
    elif isinstance(one, list):
        assert len(one) == len(two)
        for pair in zip(one, two, strict=True):
            assert_same(*pair)
    else:
        assert one == two


def test_the_boxes_of_a_tensor_depend_on_the_rank():
    tensors = []
    for rank in (0, 1):
        with testing.fake(2, rank):
            mesh = init_device_mesh("cpu", (2,))
            tensors.append(DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)], run_check=False))
            assert parts_of("t", tensors[rank])[0].box.offsets == (2 * rank, 0)
    for rank in (0, 1):  # also after the process groups are destroyed
        assert parts_of("t", tensors[rank])[0].box.offsets == (2 * rank, 0)


@distributed(world=2)
def test_tensors_in_separate_parts_are_loaded_elsewhere(rank, world, tmp_path):
    """Transformers splits fused projections so: a rank holds rows of each of them."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(24.0).view(8, 3)
    local = torch.cat([whole[2 * rank : 2 * rank + 2], whole[4 + 2 * rank : 6 + 2 * rank]])
    tensor = DTensor.from_local(local.clone(), mesh, [strided_shard(0, 2)], shape=whole.shape, stride=whole.stride())
    assert [part.box.offsets for part in parts_of("t", tensor)] == [(2 * rank, 0), (4 + 2 * rank, 0)]
    checkpoint.save(tmp_path, {"t": tensor}, step=0)
    tensor.to_local().zero_()
    loaded = {"t": torch.zeros(8, 3)}
    checkpoint.load(tmp_path, {"t": tensor})
    checkpoint.load(tmp_path, loaded)
    assert torch.equal(tensor.to_local(), local)
    assert torch.equal(loaded["t"], whole)


@distributed(world=2)
def test_local_tensors_of_another_shape_than_their_placements_are_refused(rank, world, tmp_path):
    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(torch.zeros(3, 3), mesh, [Shard(0)], shape=(8, 3), stride=(3, 1), run_check=False)
    with pytest.raises(
        (cs.errors.ShardConfigValueError, cs.errors.CheckpointError), match=r"\(3, 3\), but .* mean \(4, 3\)"
    ):
        checkpoint.save(tmp_path, {"t": tensor}, step=0)


@distributed(world=2)
def test_plain_state_of_a_sharded_parameter_is_refused(rank, world, tmp_path):
    model = cs.fully_shard(nn.Linear(4, 4, bias=False))
    optimizer = sgd(model)
    step(model, optimizer)
    state = {"model": model, "optimizer": optimizer}
    checkpoint.save(tmp_path, state, step=0)
    own = optimizer.state[model.weight]
    momentum = own["momentum_buffer"]
    own["momentum_buffer"] = momentum.to_local().clone().fill_(rank)
    with pytest.raises(
        cs.errors.CheckpointMismatchError, match=r"optimizer\.state\.model\.weight\.momentum_buffer: is a plain"
    ):
        checkpoint.load(tmp_path, state)
    assert torch.all(own["momentum_buffer"] == rank)
    own["momentum_buffer"] = {"nested": [own["momentum_buffer"]]}
    with pytest.raises(
        cs.errors.ShardConfigValueError, match=r"momentum_buffer\.nested\.0: is a plain .* make it a DTensor"
    ):
        checkpoint.save(tmp_path, state, step=1)
    with pytest.raises(
        cs.errors.ShardConfigValueError, match=r"'momentum_buffer' of weight: is a plain .* make it a DTensor"
    ):
        cs.checkpoint.full_optimizer_state_dict(model, optimizer)
    own["momentum_buffer"] = momentum
    own["factor"] = torch.tensor(2.0)  # a 0-dim tensor is not sharded
    checkpoint.save(tmp_path, state, step=1)


@distributed(world=1)
def test_plain_state_of_one_rank_stays_plain(rank, world, tmp_path):
    model = cs.fully_shard(nn.Linear(4, 4, bias=False))
    optimizer = sgd(model)
    step(model, optimizer)
    optimizer.state[model.weight].update(rows=torch.rand(3), like=torch.rand(4, 4))
    checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer}, step=0)
    fresh, torchs = sgd(model), sgd(model)
    checkpoint.load(tmp_path, {"model": model, "optimizer": fresh})
    torchs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same(fresh.state_dict(), torchs.state_dict())
    assert {type(value) for value in fresh.state[model.weight].values()} == {torch.Tensor, DTensor}


class Lookahead(torch.optim.Optimizer):
    """Steps another optimizer, and has the state dict of that optimizer."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self, closure=None):
        self.inner.step()

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state_dict):
        self.inner.load_state_dict(state_dict)


class WithSlowWeights(Lookahead):
    """Has another state dict format than torch's optimizers."""

    def state_dict(self):
        return {**self.inner.state_dict(), "slow": 1}


def test_an_optimizer_wrapper_is_saved_by_its_state_dict(tmp_path):
    model = nn.Linear(4, 2).bfloat16()
    optimizer = Lookahead(sgd(model))
    model(torch.ones(2, 4).bfloat16()).sum().backward()
    optimizer.step()
    for own in optimizer.inner.state.values():
        own["momentum_buffer"] = own["momentum_buffer"].float() + 1e-6
    saved = copy.deepcopy(optimizer.state_dict())
    checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer}, step=0)
    fresh = Lookahead(sgd(model))
    checkpoint.load(tmp_path, {"model": model, "optimizer": fresh})
    assert_same(fresh.inner.state_dict(), saved)
    with pytest.raises(
        cs.errors.ShardConfigValueError, match=r"optimizer: the state_dict of WithSlowWeights does not have"
    ):
        checkpoint.save(tmp_path, {"model": model, "optimizer": WithSlowWeights(sgd(model))}, step=1)


def test_state_of_no_parameter_and_hooks_of_state_dicts_are_kept(tmp_path):
    model = nn.Linear(4, 2)

    def make(scale):
        optimizer = sgd(model)
        optimizer.state["global"] = {"count": 3 * scale, "norm": torch.full((2,), float(scale))}
        optimizer.register_state_dict_post_hook(
            lambda _, content: {**content, "state": {"scale": scale, **content["state"]}}
        )
        return optimizer

    optimizer = make(2)
    step(model, optimizer)
    checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer}, step=0)
    fresh, torchs = make(1), make(1)
    checkpoint.load(tmp_path, {"model": model, "optimizer": fresh})
    torchs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert fresh.state["scale"] == 2
    assert_same(fresh.state_dict(), torchs.state_dict())
    optimizer.state[7] = {"count": 1}
    with pytest.raises(cs.errors.ShardConfigValueError, match=r"optimizer: its state has the key 7, which is neither"):
        checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer}, step=1)


def test_learning_rates_that_shared_a_tensor_get_separate_values(tmp_path):
    model = nn.Linear(4, 2)

    def make(*rates):
        optimizer = torch.optim.SGD([{"params": [each]} for each in model.parameters()], lr=torch.tensor(0.5))
        for group, rate in zip(optimizer.param_groups, rates, strict=False):
            group["lr"] = torch.tensor(rate)
        return optimizer

    optimizer, fresh = make(0.1, 0.2), make()
    checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer}, step=0)
    before = fresh.param_groups[0]["lr"]
    checkpoint.load(tmp_path, {"model": model, "optimizer": fresh})
    assert_same(fresh.state_dict(), optimizer.state_dict())
    assert before == 0.5


@distributed(world=1)
def test_an_optimizer_with_meta_parameters_is_refused(rank, world, tmp_path):
    model = cs.fully_shard(nn.Linear(4, 2))
    optimizer = sgd(model)
    step(model, optimizer)
    checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer}, step=0)
    for shard in (cs.fully_shard, lambda module: module):
        with torch.device("meta"):
            other = shard(nn.Linear(4, 2))
        with pytest.raises(cs.errors.CheckpointMismatchError, match=r"optimizer: has parameters on the meta device"):
            checkpoint.load(tmp_path, {"model": other, "optimizer": sgd(other)})
        assert other.weight.is_meta
        checkpoint.load(tmp_path, {"model": other})
        fresh = sgd(other)
        checkpoint.load(tmp_path, {"model": other, "optimizer": fresh})
        step(other, fresh)
    step(model, optimizer)
    assert torch.equal(other.weight, model.weight.full_tensor())


def test_two_tensors_with_one_key_are_refused_in_per_rank_values_too(tmp_path):
    one, two = torch.zeros(2), torch.ones(2)
    for value in ({"a.b": one, "a": {"b": two}}, {1: one, "1": two}):
        with pytest.raises(cs.errors.ShardConfigValueError, match=r"two tensors have the key each@0\."):
            checkpoint.save(tmp_path, {"each": checkpoint.PerRank(value)}, step=0)


@distributed(world=2)
def test_torchs_model_is_saved_after_a_forward_without_backward(rank, world, tmp_path):
    torch.manual_seed(0)
    model, other = (fsdp2(nn.Linear(4, 4)) for _ in range(2))
    optimizer, fresh = sgd(model), sgd(other)
    step(model, optimizer)
    model(torch.ones(2, 4))
    other(torch.ones(2, 4))
    checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer}, step=0)
    checkpoint.load(tmp_path, {"model": other, "optimizer": fresh})
    step(model, optimizer)
    step(other, fresh)
    for one, two in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), two.full_tensor())


@distributed(world=1)
def test_compiled_and_replicated_models_keep_their_names(rank, world, tmp_path):
    def compiled(module):
        return torch.compile(module, backend="eager")

    ddp = nn.parallel.DistributedDataParallel
    for number, wrap in enumerate((compiled, ddp, lambda m: compiled(ddp(m)), lambda m: compiled(ddp(compiled(m))))):
        model, other = nn.Linear(4, 2), nn.Linear(4, 2)
        wrapped = wrap(model)
        checkpoint.save(tmp_path / "own", {"model": wrapped, "optimizer": sgd(wrapped)}, step=number)
        checkpoint.load(tmp_path / "own", {"model": other, "optimizer": sgd(other)})
        assert torch.equal(other.weight, model.weight)
        checkpoint.export_safetensors(tmp_path / f"files-{number}", wrapped)
        checkpoint.import_safetensors(tmp_path / f"files-{number}", nn.Linear(4, 2))


@needs_accelerator
@distributed(world=1)
def test_loaded_tensors_are_on_their_devices(rank, world, tmp_path):
    device = torch.accelerator.current_accelerator().type
    mesh = init_device_mesh(device, (1,))

    def make(on):
        with torch.device(on):
            model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        cs.fully_shard(model[0], mesh=mesh, offload_policy=cs.CPUOffloadPolicy())
        return model

    model, other = make(device), make("meta")
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer}, step=0)
    checkpoint.load(tmp_path, {"model": other})
    local = other[0].weight.to_local()
    assert local.device.type == "cpu"
    assert local.is_pinned()
    assert {tensor.device.type for tensor in (*other[1].parameters(), *other[1].buffers())} == {device}
    fresh = torch.optim.SGD(other.parameters(), lr=rate.to(device))
    checkpoint.load(tmp_path, {"model": other, "optimizer": fresh})
    assert fresh.param_groups[0]["lr"].device.type == device
