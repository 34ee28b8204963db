"""`grad_dtype` of parameters: the dtype in which their gradients are accumulated, reduced and kept in `.grad`.

The reference is the unsharded model with the same `grad_dtype`. From torch 2.15 on, FSDP2 follows `grad_dtype` as well.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import composable_shard as cs
from _engines import ENGINES, fully_shard, mesh_of
from _pool import distributed
from composable_shard import make_plan

BF16, FP32 = torch.bfloat16, torch.float32
FOLLOWS = torch.__version__ >= "2.15"  # whether FSDP2 follows `grad_dtype`, and torch tells whether it was set
SHARDS = {name: engine for name, engine in ENGINES.items() if name == "ours" or FOLLOWS}
MICROBATCHES = 3


def norms_only(name):
    return name.startswith("2.")


def make(dtype=BF16, grad_dtype=None, of=lambda name: True):
    """Two linear layers and a norm, with `grad_dtype` set on the parameters whose names `of` selects."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 6), nn.LayerNorm(6)).to(dtype)
    set_on(model, grad_dtype, of)
    return model


def set_on(model, grad_dtype, of=lambda name: True):
    for name, param in model.named_parameters():
        if of(name):
            param.grad_dtype = grad_dtype


def shard(model, engine=fully_shard, **options):
    engine(model[0], **options)
    engine(model, **options)
    return model


def batch(rank, index):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * index + rank))


def loss_of(model, rank, index):
    return model(batch(rank, index).to(model[0].bias.dtype)).float().square().sum()


def train(model, rank, step=0, batches=MICROBATCHES):
    """Accumulate the gradients of some microbatches, reduced with the last one."""
    for index in range(batches):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(index == batches - 1)
        loss_of(model, rank, 10 * step + index).backward()


def averages(make_model, world, **options):
    """The gradients of the unsharded model, averaged over the ranks."""
    gradients = []
    for rank in range(world):
        model = make_model()
        train(model, rank, **options)
        gradients.append({name: param.grad for name, param in model.named_parameters()})
    return {name: sum(each[name] for each in gradients) / world for name in gradients[0]}


def assert_gradients(model, wanted):
    for name, param in model.named_parameters():
        assert param.grad.dtype is wanted[name].dtype, name
        assert torch.equal(param.grad.full_tensor(), wanted[name]), name


@pytest.mark.parametrize("name", SHARDS)
@pytest.mark.parametrize("late", [False, True], ids=["before sharding", "after sharding"])
@pytest.mark.parametrize("batches", [1, MICROBATCHES])
@distributed(world=(1, 2))
def test_gradients_of_bfloat16_weights_are_accumulated_and_kept_in_float32(rank, world, name, late, batches):
    make_model = functools.partial(make, grad_dtype=FP32)
    if late:
        model = shard(make(grad_dtype=BF16, of=lambda name: False), SHARDS[name])
        set_on(model, FP32)
    else:
        model = shard(make_model(), SHARDS[name])
    for step in range(2):  # one step further, too
        model.zero_grad(set_to_none=step == 0)
        train(model, rank, step, batches)
        assert_gradients(model, averages(make_model, world, step=step, batches=batches))
    with torch.no_grad():
        assert loss_of(model.eval(), rank, 0).isfinite()


@pytest.mark.parametrize("grad_dtype", [FP32, BF16, None], ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("policy", [(None, None), (BF16, None), (BF16, FP32)], ids=str)
@distributed(world=2)
def test_gradients_are_those_of_fsdp2(rank, world, grad_dtype, dtype, policy):
    """Before torch 2.15, only the dtypes are compared, because FSDP2 does not follow `grad_dtype`."""
    param_dtype, reduce_dtype = policy
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    models = {name: shard(make(dtype, grad_dtype), engine, mp_policy=policy) for name, engine in SHARDS.items()}
    for model in models.values():
        train(model, rank, batches=1)
    got = {name: param.grad for name, param in models["ours"].named_parameters()}
    expected = grad_dtype if grad_dtype is not None else reduce_dtype or param_dtype or dtype
    assert {grad.dtype for grad in got.values()} == {expected}
    if FOLLOWS:
        assert_gradients(models["fsdp2"], {name: grad.full_tensor() for name, grad in got.items()})


@pytest.mark.parametrize("name", SHARDS)
@distributed(world=2)
def test_a_group_is_reduced_in_the_dtype_to_which_those_of_its_gradients_promote(rank, world, name):
    model = shard(make(grad_dtype=FP32, of=norms_only), SHARDS[name])
    train(model, rank, batches=1)
    single = averages(functools.partial(make, grad_dtype=FP32), world, batches=1)
    wanted = {at: grad if norms_only(at) else grad.to(BF16) for at, grad in single.items()}
    assert_gradients(model, wanted)
    if name == "ours":
        groups = make_plan(model).groups
        reduced = {param.fqn: param.reduced for group in groups for param in group.params}
        assert reduced == {at: BF16 if at.startswith("0.") else FP32 for at in single}


@distributed(world=4)
def test_replicas_keep_pieces_in_float32_until_their_all_reduce(rank, world):
    make_model = functools.partial(make, grad_dtype=FP32)
    model = shard(make_model(), mesh=mesh_of(2, 2))
    model.set_requires_all_reduce(False)
    loss_of(model, rank, 0).backward()
    model.set_requires_all_reduce(True)
    loss_of(model, rank, 1).backward()
    for name, param in model.named_parameters():
        wanted = averages(make_model, world, batches=2)[name]
        assert param.grad.dtype is FP32
        torch.testing.assert_close(param.grad.full_tensor(), wanted, rtol=1e-6, atol=1e-7)  # the order of the sum


@distributed(world=4)
def test_partial_gradients_of_dtensors_are_summed_in_float32(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    weight = torch.linspace(-1, 1, 32).view(4, 8)
    layer = nn.Linear(8, 4, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(weight.to(BF16), mesh["tp"], [Replicate()]))
    layer.weight.grad_dtype = FP32
    fully_shard(layer, mesh=mesh["dp"])
    x = batch(rank, 0).to(BF16)
    layer(DTensor.from_local(x, mesh["tp"], [Shard(0)])).to_local().float().sum().backward()
    own = [batch(each, 0).to(BF16).sum(0, keepdim=True).expand(4, 8).float() for each in range(world)]
    assert layer.weight.grad.dtype is FP32
    wanted = sum(own) / 2  # a sum over tp, and a mean over dp
    assert torch.equal(layer.weight.grad.full_tensor(), wanted)


# Graphs of torch 2.11 return zeros for gradients that are set. So whole graphs are refused there.
TRACED = torch.__version__ >= "2.13"
REFUSED = "a grad_dtype other than the dtype of the parameter needs torch 2.13 or later"


@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "model"])
@distributed(world=2)
def test_compiled_models_keep_gradients_in_float32(rank, world, whole):
    torch._dynamo.reset()
    make_model = functools.partial(make, grad_dtype=FP32)
    model = shard(make_model())
    if whole:
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
        if not TRACED:
            with pytest.raises(Exception, match=REFUSED):
                run(batch(rank, 0).to(BF16))
            return
    else:
        model[0].compile(backend="aot_eager")
        run = model
    calls = []
    model[0].weight.register_post_accumulate_grad_hook(lambda param: calls.append(param.grad.dtype))
    for step, batches in enumerate((1, 2)):  # Dynamo cannot trace while `.grad` has another dtype than its parameter
        model.zero_grad()
        for index in range(batches):
            model.set_requires_gradient_sync(index == batches - 1)
            run(batch(rank, 10 * step + index).to(BF16)).float().square().sum().backward()
        assert_gradients(model, averages(make_model, world, step=step, batches=batches))
    assert calls == [FP32] * 2


@distributed(world=2)
def test_a_compiled_step_that_would_overwrite_such_a_gradient_is_an_error(rank, world):
    torch._dynamo.reset()
    model = shard(make(grad_dtype=FP32))
    loss_of(model, rank, 0).backward()
    model.zero_grad()

    def step(x):
        model(x).float().square().sum().backward()

    error = "a parameter with a grad_dtype other than its own dtype cannot be part of a compiled step"
    with (
        torch._dynamo.config.patch({"trace_autograd_ops": True} if TRACED else {}),
        pytest.raises(RuntimeError, match=error if TRACED else REFUSED),
    ):
        torch.compile(step, backend="aot_eager", fullgraph=True)(batch(rank, 0).to(BF16))


@distributed(world=2)
def test_copies_conversions_and_loads_keep_it(rank, world):
    make_model = functools.partial(make, grad_dtype=FP32)
    model = shard(make_model())
    train(model, rank)
    twin = copy.deepcopy(model)
    assert_gradients(twin, {name: param.grad.full_tensor() for name, param in model.named_parameters()})
    for convert in (
        lambda: twin.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
        lambda: twin.cpu(),
        lambda: twin.to(torch.float64).to(BF16),
    ):
        twin.zero_grad()
        train(twin, rank)
        twin.zero_grad()
        convert()
        train(twin, rank)
        assert_gradients(twin, averages(make_model, world))


@pytest.mark.parametrize("name", SHARDS)
@pytest.mark.parametrize("convert", ["cpu", "bfloat16"])
@distributed(world=2)
def test_conversions_keep_gradients_in_their_own_dtype(rank, world, name, convert):
    make_model = functools.partial(make, grad_dtype=FP32)
    model = shard(make_model(), SHARDS[name])
    train(model, rank, batches=1)
    getattr(model, convert)()
    train(model, rank, step=1, batches=1)
    first, second = (averages(make_model, world, step=step, batches=1) for step in range(2))
    assert_gradients(model, {at: first[at] + second[at] for at in first})


@distributed(world=2)
def test_meta_parameters_keep_it(rank, world):
    with torch.device("meta"):
        model = nn.Linear(8, 4, dtype=BF16)
    set_on(model, FP32)
    fully_shard(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    model(batch(rank, 0).to(BF16)).float().sum().backward()
    assert {param.grad.dtype for param in model.parameters()} == {FP32}


@distributed(world=2)
def test_optimizers_step_with_such_gradients(rank, world):
    """The step of an offloaded optimizer, of one in backward, and of a plain one are the same."""

    def trained(kind):
        model = shard(make(grad_dtype=FP32))
        sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        optimizer = cs.optim.in_backward(model, sgd) if kind == "in backward" else sgd(model.parameters())
        if kind == "offloaded":
            cs.optim.offload_optimizer(optimizer, policy=cs.HostOffloadPolicy())
        for step in range(2):
            train(model, rank, step, batches=1)
            optimizer.step()
            optimizer.zero_grad()
        return {name: param.full_tensor() for name, param in model.named_parameters()}

    wanted = trained("plain")
    for kind in ("offloaded", "in backward"):
        for name, weight in trained(kind).items():
            assert torch.equal(weight, wanted[name]), (kind, name)


class Wide(torch.autograd.Function):
    """A product whose backward returns the gradient of a bfloat16 factor in float32."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        return None, (ctx.saved_tensors[0].float() / 3 * grad.float()).sum(0)


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, dtype=BF16))

    def forward(self, x):
        return Wide.apply(x, self.weight)


@pytest.mark.parametrize("name", SHARDS)
@distributed(world=1)
def test_only_fsdp2_keeps_a_gradient_that_is_wider_than_its_weight(rank, world, name):
    model, x = Product(), batch(0, 0).to(BF16)
    model.weight.grad_dtype = FP32
    SHARDS[name](model)
    model(x).sum().backward()
    wide = (x.float() / 3).sum(0)
    wanted = wide if name == "fsdp2" else wide.to(BF16).float()
    assert torch.equal(model.weight.grad.full_tensor(), wanted)


@distributed(world=2)
def test_unused_parameters_need_a_dtype(rank, world):
    model = shard(make(grad_dtype=None))
    model.set_reduce_scatter_unused_params(True)
    with pytest.raises(ValueError, match=r"Reducing unused parameters with grad_dtype=None requires an explicit"):
        loss_of(model, rank, 0).backward()


@distributed(world=1)
def test_an_integer_dtype_is_an_error(rank, world):
    with pytest.raises(ValueError, match=r"parameter 2.weight: has grad_dtype torch.int64; set it to a floating-point"):
        fully_shard(make(grad_dtype=torch.int64, of=norms_only))


@distributed(world=2)
def test_a_change_after_the_first_forward_is_an_error(rank, world):
    model = shard(make())
    train(model, rank, batches=1)
    model.zero_grad()
    set_on(model, torch.float16, norms_only)
    for sync in (True, False):
        model.set_requires_gradient_sync(sync)
        with pytest.raises(
            cs.errors.ShardConfigStateError, match=r"2.weight: grad_dtype was set to torch.float16 after"
        ):
            loss_of(model, rank, 0).backward()


@distributed(world=2)
def test_gradients_asked_for_under_accumulation_have_its_dtype(rank, world):
    model = shard(make(grad_dtype=FP32))
    model.set_requires_gradient_sync(False)
    (grad,) = torch.autograd.grad(loss_of(model, rank, 0), [model[0].weight])
    assert isinstance(grad, DTensor)
    assert not isinstance(grad.placements[0], Partial)
    assert grad.dtype is FP32
