"""Packed parameters: frozen bytes with separate scales, under adapters that train."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import composable_shard as cs
from _packed import Block, Packed4Linear, Packed8Linear, Quantized, batch, bits, shard
from _pool import distributed, more, simulated
from _sides import models_of, optimizers_of
from _stepping import engine_of

STORAGES = [torch.uint8, torch.bfloat16, torch.float16, torch.float32, more(torch.int32), more(torch.int8)]
KINDS = {"4 bits": Packed4Linear, "8 bits": Packed8Linear}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)


def of(storage):
    return partial(Quantized, partial(Packed4Linear, storage=storage))


def sides(make, options=None, cut=shard):
    """Make the unsharded model and ours."""
    return models_of(make, cut, fsdp2=False, **(options or {}))


def packed_of(model):
    return {
        name: module for name, module in model.named_modules() if isinstance(module, (Packed4Linear, Packed8Linear))
    }


def assert_bits(models):
    """Check that packed weights, also as seen in forwards, are bitwise identical to the unsharded model's."""
    plain = packed_of(models["plain"])
    for name, layer in packed_of(models["ours"]).items():
        assert torch.equal(bits(layer.weight.full_tensor()), bits(plain[name].weight)), name
        for seen in getattr(layer, "seen", ()):
            assert torch.equal(seen.flatten(), bits(plain[name].weight).flatten()), name


def ignore_of_dynamo():
    """Ignore a warning that Dynamo causes with every autograd function."""
    warnings.filterwarnings("ignore", message=".*autograd.function.Function'> should not be instantiated")


def mean_square(model, step):
    return model(batch(step)).square().mean()


def mean_of_ranks(gradient):
    """Return the mean of equal gradients, which is rounded if the world size is not a power of two."""
    world = dist.get_world_size()
    return sum([gradient] * world) / world


def train(models, steps=3, loss_of=mean_square, optimizers=None):
    optimizers = optimizers or optimizers_of(models)
    for step in range(steps):
        losses = {name: loss_of(model, step) for name, model in models.items()}
        for name, loss in losses.items():
            loss.backward()
            assert torch.equal(loss, losses["plain"]), (name, step)
        trained = {name: {n: p.grad for n, p in model.named_parameters()} for name, model in models.items()}
        for name, grad in trained["plain"].items():
            ours = trained["ours"][name]
            assert (grad is None) == (ours is None), name
            if grad is not None:
                grad.copy_(mean_of_ranks(grad))
                assert torch.equal(ours.full_tensor(), grad), (name, step)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    assert_bits(models)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("transport", [None, more("torch"), "packed"])
@distributed(world=(2, more(3)))
def test_adapters_over_packed_weights_train_like_the_unsharded_model(rank, world, storage, transport):
    with pytest.MonkeyPatch.context() as patch:
        if transport:
            patch.setenv("COMPOSABLE_SHARD_TRANSPORT", transport)
        models = sides(of(storage))
        assert packed_of(models["plain"])["blocks.0.first.base"].weight.dtype is storage
        train(models)


@pytest.mark.parametrize("options", [{"reshard_after_forward": False}, {"reshard_after_forward": 2}, {}], ids=str)
@distributed(world=4)
def test_packed_weights_are_bitwise_unchanged_with_every_way_of_resharding(rank, world, options):
    train(sides(partial(Quantized, partial(Packed4Linear, storage=torch.bfloat16), wide=22), options))
    train(sides(partial(Quantized, Packed8Linear, wide=21), options))  # uneven


@distributed(world=4)
def test_packed_weights_are_exact_on_a_mesh_with_replicas(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for make in (of(torch.float32), partial(Quantized, Packed8Linear)):
        train(sides(make, {"mesh": mesh}))


@simulated(world=4)
def test_packed_weights_are_sharded_at_multiples_of_rows(rank, world):
    placed = {"shard_placement_fn": lambda param: cs.Ragged(5)}
    for make in (of(torch.bfloat16), partial(Quantized, Packed8Linear)):
        models = sides(make, placed)
        weights = [layer.weight for layer in packed_of(models["ours"]).values()]
        assert all(weight.placements == (cs.Ragged(5),) for weight in weights)
        assert all(weight.to_local().shape[0] % 5 == 0 for weight in weights if rank == 0)
        train(models)


def in_bfloat16(model, step):
    """Return the loss of the unsharded model in mixed precision: all except packed weights are in bfloat16."""
    packed = {id(layer.weight) for layer in packed_of(model).values()}
    cast = {n: p.to(torch.bfloat16) for n, p in model.named_parameters() if id(p) not in packed}
    return functional_call(model, cast, (batch(step).to(torch.bfloat16),)).square().mean()


@pytest.mark.parametrize("make", [of(torch.float32), of(torch.float16), partial(Quantized, Packed8Linear)])
@distributed(world=2)
def test_mixed_precision_does_not_cast_packed_weights(rank, world, make):
    models = sides(make, {"mp_policy": BF16})

    def loss_of(model, step):
        return in_bfloat16(model, step) if model is models["plain"] else mean_square(model, step)

    train(models, loss_of=loss_of)


@pytest.mark.parametrize("kind", KINDS)
@simulated(world=2)
def test_packed_weights_are_freed_between_forward_and_backward(rank, world, kind):
    model = sides(partial(Quantized, KINDS[kind]))["ours"]
    for step in range(3):
        loss = model(batch(step)).square().mean()
        engine = engine_of(model)
        root = next(group for group in engine.groups if group.is_root)
        assert engine.pool.live_bytes == sum(slot.nbytes for b in root.buckets if (slot := b.slot) is not None)
        assert engine.pool.lent_bytes == 0
        for layer in packed_of(model).values():
            kept = [each for each in vars(layer.weight).values() if isinstance(each, torch.Tensor)]
            assert all(each.numel() < layer.weight.numel() for each in kept)
            if kind == "8 bits":
                assert layer.state.whole.untyped_storage().nbytes() == 0
        loss.backward()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reads", ["checkpoint", "reentrant", "twice", "on demand", "alone"])
@distributed(world=2)
def test_backward_gathers_packed_weights_that_layers_keep(rank, world, kind, reads):
    class Checkpointed(Quantized):
        def forward(self, x):
            x = x.clone().requires_grad_()
            for block in self.blocks:
                if reads in ("checkpoint", "reentrant"):
                    x = checkpoint(block, x, use_reentrant=reads == "reentrant")
                else:
                    x = block(block(x)) if reads == "twice" else block(x)
            return self.head(x)

    def each_alone(model, engine, **options):
        for layer in packed_of(model).values():
            engine(layer, **options)
        shard(model, engine, **options)

    models = sides(partial(Checkpointed, KINDS[kind]), cut=each_alone if reads == "alone" else shard)
    if reads == "on demand":
        for module in models["ours"].modules():
            if isinstance(module, cs.FSDPModule):
                module.set_unshard_in_backward(False)
    train(models)


@pytest.mark.parametrize("kind", KINDS)
@distributed(world=2)
def test_evaluation_between_steps_changes_nothing(rank, world, kind):
    models = sides(partial(Quantized, KINDS[kind]))
    optimizers = optimizers_of(models)
    for _ in range(2):
        train(models, 1, optimizers=optimizers)
        plain = copy.deepcopy(models["plain"])  # the unsharded layer keeps its repacked weight
        with torch.no_grad():
            outputs = [side.eval()(batch(7)) for side in (plain, models["ours"])]
        assert torch.equal(*outputs)
        outputs = [side(batch(7)) for side in (copy.deepcopy(models["plain"]).eval(), models["ours"])]
        assert torch.equal(*outputs)
        models["ours"].train()
    train(models, optimizers=optimizers)


@pytest.mark.matrix
@pytest.mark.parametrize("storage", [torch.bfloat16, more(torch.float32), more(torch.uint8)], ids=str)
@pytest.mark.parametrize("backend", ["aot_eager", more("inductor")])
@distributed(world=2, limit_s=200)
def test_packed_weights_are_exact_in_one_full_graph(rank, world, storage, backend):
    models = sides(of(storage))
    torch._dynamo.reset()
    ignore_of_dynamo()
    runs = {name: torch.compile(model, backend=backend, fullgraph=True) for name, model in models.items()}
    if backend == "inductor" and torch.__version__ < "2.13" and storage is not torch.uint8:
        with pytest.raises(torch._inductor.exc.InductorError, match="must be 1 to view"):
            runs["plain"](batch(0))
        return
    optimizers = optimizers_of(models)
    for step in range(2):
        losses = {name: run(batch(step)).square().mean() for name, run in runs.items()}
        assert torch.equal(losses["ours"], losses["plain"])
        for name, loss in losses.items():
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
    assert_bits(models)
    for name, param in models["plain"].named_parameters():
        if param.requires_grad:  # read as numbers, packed bits may be NaN, which is not equal to itself
            assert torch.equal(models["ours"].get_parameter(name).full_tensor(), param), name


@pytest.mark.parametrize("kind", KINDS)
@distributed(world=2)
def test_packed_weights_are_exact_in_separately_compiled_blocks(rank, world, kind):
    models = sides(partial(Quantized, KINDS[kind]))
    torch._dynamo.reset()
    ignore_of_dynamo()
    for block in models["ours"].blocks:
        block.compile(backend="aot_eager")
    train(models, steps=2)


@pytest.mark.parametrize("kind", KINDS)
@simulated(world=2)
def test_packed_weights_are_not_rounded_when_others_are_sent_in_fewer_bits(rank, world, kind):
    models = sides(partial(Quantized, KINDS[kind]))
    ours = models["ours"]
    ours.set_comm_policy(cs.CommPolicy(gather="int8"))
    for step in range(2):
        outputs = [model(batch(step)) for model in models.values()]
        assert not torch.equal(*outputs)  # adapters are rounded
        torch.testing.assert_close(*outputs, rtol=0.1, atol=0.1)
        outputs[1].square().mean().backward()
        assert_bits(models)


@pytest.mark.parametrize("change", ["dtype", "assign", "copy"])
@simulated(world=2)
def test_the_attributes_of_a_packed_parameter_survive_conversion_loading_and_copying(rank, world, change):
    models = sides(of(torch.uint8))
    ours = models["ours"]
    before = ours.blocks[0].first.base.weight.scales
    if change == "dtype":
        for model in models.values():
            model.double().float()
    elif change == "assign":
        ours.load_state_dict({name: value.clone() for name, value in ours.state_dict().items()}, assign=True)
        ours(batch(0))
        ours.reshard()
    else:
        models["ours"] = ours = copy.deepcopy(ours)
        assert ours.blocks[0].first.base.weight.scales is not before
    weight = ours.blocks[0].first.base.weight
    assert weight.kind == "four bits"
    assert torch.equal(weight.scales.scales, before.scales)
    train(models)


@simulated(world=2)
def test_a_plan_shows_packed_parameters_and_their_separate_gathers(rank, world):
    policy = replace(BF16, reduce_dtype=torch.bfloat16)
    plan = cs.make_plan(sides(of(torch.bfloat16), {"mp_policy": policy})["ours"])
    group = next(group for group in plan.groups if group.fqn == "blocks.0")
    assert group.dtype == "float32 as bfloat16, bfloat16 packed"
    assert len(group.gather_layouts) == 2
    assert cs.ShardPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("options", [{}, {"shard_placement_fn": lambda param: cs.Ragged(5)}])
@simulated(world=2)
def test_gathered_bytes_of_packed_parameters_match_the_plan(rank, world, options):
    model = sides(of(torch.bfloat16), options)["ours"]
    model(batch(0)).sum().backward()
    engine = engine_of(model)
    sizes = {group.fqn: group.sizes.weights for group in engine.order.plan.groups}
    assert {group.fqn: group.layout.weight_bytes for group in engine.groups} == sizes


@simulated(world=2)
def test_packed_weights_are_bitwise_unchanged_next_to_others_in_fewer_bits(rank, world):
    model = sides(of(torch.bfloat16), {"shard_placement_fn": lambda param: cs.Ragged(5)})["ours"]
    model.set_comm_policy(cs.CommPolicy("fp8", "int8", block=8))
    model(batch(0)).sum().backward()
    group = cs.make_plan(model).group("blocks.0")
    assert [layout.parcel is not None for layout in group.gather_layouts] == [True, False]
    plain = packed_of(of(torch.bfloat16)())
    for name, layer in packed_of(model).items():
        assert layer.seen, name
        assert all(seen.numel() == bits(plain[name].weight).numel() for seen in layer.seen)
        assert all(torch.equal(seen.flatten(), bits(layer.weight.full_tensor()).flatten()) for seen in layer.seen)


class CastsBias(nn.Linear):
    """Converts the data of its bias to the dtype of the input, as some layers do."""

    def forward(self, x):
        self.bias.data = self.bias.data.to(x.dtype)
        return nn.functional.linear(x, self.weight.to(x.dtype), self.bias)


@simulated(world=2)
def test_data_that_an_evaluation_sets_on_a_parameter_is_reset_by_the_next_gather(rank, world):
    torch.manual_seed(0)
    model = cs.fully_shard(nn.Sequential(CastsBias(4, 4)))
    for _ in range(4):
        with torch.no_grad():
            output = model(torch.zeros(1, 4, dtype=torch.float64))
            assert torch.equal(output[0], model[0].bias.full_tensor().double())
            model[0].bias.add_(1.0)


class Uncut(torch.Tensor):
    """A frozen weight made of two parts that cannot be sliced."""

    @staticmethod
    def __new__(cls, data, scales):
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)
        made.data_part, made.scales = data, scales
        return made

    def __tensor_flatten__(self):
        return ["data_part", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, parts, _, shape, stride):
        return cls(parts["data_part"], parts["scales"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data_part, args[0].scales)
        raise NotImplementedError(f"{func} is not known")


@simulated(world=2)
def test_a_tensor_subclass_that_cannot_be_sharded_is_an_error(rank, world):
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(Uncut(torch.ones(4, 4), torch.ones(4)), requires_grad=False)
    with pytest.raises(
        cs.errors.ShardConfigError, match=r"parameter weight: a Uncut of shape \(4, 4\) cannot be split"
    ):
        cs.fully_shard(model)


def test_the_layers_of_this_file_get_gradients():
    block = Block(Packed8Linear, 8, 8, trains=True)
    block(torch.randn(2, 8)).sum().backward()
    assert block.first.down.weight.grad is not None
