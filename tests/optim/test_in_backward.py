"""Steps inside of backward give the weights of ordinary steps, and gradients never all exist at the same time."""

from __future__ import annotations

import contextlib
import copy
import functools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch
from _pool import distributed, more, simulated
from composable_shard import checkpoint
from composable_shard.errors import ShardConfigStateError, ShardConfigTypeError, ShardConfigValueError
from optim._single import sharded, whole

KINDS = {
    "adamw": lambda params: torch.optim.AdamW(
        [{"params": [p for p in params if p.ndim > 1]}, {"params": [p for p in params if p.ndim < 2], "lr": 0.02}],
        lr=0.01,
    ),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}  # fmt: skip


def models(shard=sharded, net=lambda: Transformer(layers=2)):
    """Two models with equal values, one for each way to step."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(net())
        shard(made[-1])
    return made


def loss_of(model, rank, step):
    return next_token_loss(model, *token_batch(rank, step))


def assert_alike(one, two, exact=True):
    how = {"rtol": 0, "atol": 0} if exact else {}
    for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(whole(a), whole(b), **how, msg=lambda text, name=name: f"{name}: {text}")


def state_of(optimizer):
    return {
        index: {key: whole(value).clone() for key, value in held.items()}
        for index, held in optimizer.state_dict()["state"].items()
    }


@distributed(world=4)
def test_steps_with_outer_sharding_are_bitwise_identical_to_ordinary_steps(rank, world):
    """The optimizer changes stored parameters while the backward still reads the compute copies."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    ordinary, model = models(functools.partial(sharded, mesh=mesh, outer_sharding="optimizer"))
    optimizers = [KINDS["adamw"](list(ordinary.parameters())), cs.optim.in_backward(model, KINDS["adamw"])]
    for step in range(4):
        for net, optimizer in zip((ordinary, model), optimizers, strict=True):
            for micro in range(2):
                net.set_requires_gradient_sync(micro == 1 or step == 0)
                loss_of(net, rank, 2 * step + micro).backward() if micro or step else None
            optimizer.step()
            optimizer.zero_grad()
        assert_alike(model, ordinary)
        with torch.no_grad():
            assert torch.equal(*(loss_of(net, rank, step) for net in (ordinary, model)))


@pytest.mark.parametrize("kind", ["adamw", more("sgd")])
@distributed(world=(2, more(4)))
def test_steps_with_a_schedule_are_bitwise_identical_to_ordinary_steps(rank, world, kind):
    ordinary, model = models()
    optimizers = [KINDS[kind](list(ordinary.parameters())), cs.optim.in_backward(model, KINDS[kind])]
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 10) for each in optimizers]
    for step in range(4):
        for net, optimizer, schedule in zip((ordinary, model), optimizers, schedules, strict=True):
            loss_of(net, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        assert_alike(model, ordinary)
    states = [state_of(optimizer) for optimizer in optimizers]
    assert states[0].keys() == states[1].keys()
    for index, held in states[0].items():
        assert all(torch.equal(value, states[1][index][key]) for key, value in held.items())
    groups = [optimizer.state_dict()["param_groups"] for optimizer in optimizers]
    assert groups[0] == groups[1]


def live(params):
    """Bytes of the existing gradients."""
    return sum(p.grad.to_local().nbytes for p in params if p.grad is not None)


@simulated(world=2)
def test_only_the_gradients_of_one_group_exist_at_a_time(rank, world):
    ordinary, model = models()
    peaks = {}
    for name, net in (("ordinary", ordinary), ("in backward", model)):
        seen, params = peaks.setdefault(name, []), list(net.parameters())
        for param in params:
            param.register_post_accumulate_grad_hook(lambda _, all_=params, seen=seen: seen.append(live(all_)))
    cs.optim.in_backward(model, KINDS["sgd"], max_norm=1e9)  # clips each group, and so steps it as a whole
    for net in (ordinary, model):
        loss_of(net, rank, 0).backward()
    groups = [sum(p.to_local().nbytes for p in block.parameters()) for block in model.blocks]
    root = live(ordinary.parameters()) - sum(groups)
    assert max(peaks["ordinary"]) == sum(groups) + root
    assert 0 < max(peaks["in backward"]) <= max(*groups, root)
    assert live(model.parameters()) == 0


@pytest.mark.parametrize("options", [{}, {"max_norm": 9.0, "norm_of": "delayed"}])
@simulated(world=2)
def test_a_large_group_is_stepped_in_parts(rank, world, options):
    ordinary, model = models()
    params, seen = list(model.parameters()), []
    largest = max(p.to_local().nbytes for p in params)
    for param in params:
        param.register_post_accumulate_grad_hook(lambda _: seen.append(live(params)))
    optimizers = [KINDS["adamw"](list(ordinary.parameters())), cs.optim.in_backward(model, KINDS["adamw"], **options)]
    for step in range(3):
        for net, optimizer in zip((ordinary, model), optimizers, strict=True):
            loss_of(net, rank, step).backward()
            assert net is ordinary or live(params) == 0
            optimizer.step()
            optimizer.zero_grad()
    assert_alike(model, ordinary)
    assert 0 < max(seen) <= largest


@simulated(world=2)
def test_without_gradient_synchronization_microbatches_accumulate(rank, world):
    ordinary, model = models()
    optimizers = [KINDS["adamw"](list(ordinary.parameters())), cs.optim.in_backward(model, KINDS["adamw"])]
    for step in range(2):
        for net, optimizer in zip((ordinary, model), optimizers, strict=True):
            for micro in range(3):
                net.set_requires_gradient_sync(micro == 2)
                loss_of(net, rank, 3 * step + micro).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_alike(model, ordinary)


@pytest.mark.matrix
@simulated(world=2)
def test_reduced_microbatches_accumulate_in_the_accumulating_context(rank, world):
    ordinary, model = models()
    optimizers = [KINDS["adamw"](list(ordinary.parameters())), cs.optim.in_backward(model, KINDS["adamw"])]
    for step in range(2):
        with optimizers[1].accumulating():
            loss_of(model, rank, 2 * step).backward()
        assert live(model.parameters()) > 0
        loss_of(model, rank, 2 * step + 1).backward()
        assert live(model.parameters()) == 0
        for micro in range(2):
            loss_of(ordinary, rank, 2 * step + micro).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_alike(model, ordinary)


class Forked(nn.Module):
    """Runs one of two branches, and uses a shared layer twice."""

    def __init__(self):
        super().__init__()
        self.shared, self.left, self.right = (nn.Linear(6, 6) for _ in range(3))
        self.extra = nn.Parameter(torch.ones(6))

    def forward(self, x, left):
        x = self.shared(x)
        x = self.left(x) if left else self.right(x)
        return self.shared(x) * (self.extra if left else 1.0)


def fork(model):
    for layer in (model.shared, model.left, model.right):
        cs.fully_shard(layer)
    cs.fully_shard(model)


@simulated(world=2)
def test_groups_that_run_twice_or_lack_gradients_are_stepped_once(rank, world):
    ordinary, model = models(fork, Forked)
    for net in (ordinary, model):
        net.right.bias.requires_grad_(False)
    optimizers = [KINDS["adamw"](list(ordinary.parameters())), cs.optim.in_backward(model, KINDS["adamw"])]
    for step, left in enumerate((True, False, True)):
        for net, optimizer in zip((ordinary, model), optimizers, strict=True):
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(7 * step + rank))
            net(x, left).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_alike(model, ordinary)


@simulated(world=2)
def test_parameters_outside_of_the_optimizer_keep_their_gradients(rank, world):
    def make(params):
        return torch.optim.SGD([p for p in params if p.ndim > 1], lr=0.1)

    ordinary, model = models()
    optimizers = [make(list(ordinary.parameters())), cs.optim.in_backward(model, make, max_norm=None)]
    for net, optimizer in zip((ordinary, model), optimizers, strict=True):
        loss_of(net, rank, 0).backward()
        kept = [p.grad is not None for p in net.parameters() if p.ndim > 1]
        assert any(kept) == (net is ordinary)
        assert all(p.grad is not None for p in net.parameters() if p.ndim == 1)
        optimizer.step()
    assert_alike(model, ordinary)


@pytest.mark.matrix
@simulated(world=2)
def test_a_closure_runs_the_backward_that_steps(rank, world):
    ordinary, model = models()
    optimizers = [KINDS["sgd"](list(ordinary.parameters())), cs.optim.in_backward(model, KINDS["sgd"])]
    for net, optimizer in zip((ordinary, model), optimizers, strict=True):

        def closure(net=net):
            loss = loss_of(net, rank, 0)
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0
    assert_alike(model, ordinary)


@simulated(world=2)
def test_each_group_is_clipped_by_its_own_norm(rank, world):
    ordinary, model = models()
    plain = KINDS["sgd"](list(ordinary.parameters()))
    optimizer = cs.optim.in_backward(model, KINDS["sgd"], max_norm=0.05)
    for step in range(3):
        loss_of(ordinary, rank, step).backward()
        blocks = [list(block.parameters()) for block in ordinary.blocks]
        inside = {id(p) for block in blocks for p in block}
        for params in (*blocks, [p for p in ordinary.parameters() if id(p) not in inside]):
            cs.clip_grad_norm_(params, 0.05)
        loss_of(model, rank, step).backward()
        for each in (plain, optimizer):
            each.step()
            each.zero_grad()
        assert_alike(model, ordinary, exact=False)


@distributed(world=2)
def test_the_delayed_norm_covers_all_gradients_of_the_previous_step(rank, world):
    ordinary, model = models()
    plain = KINDS["sgd"](list(ordinary.parameters()))
    optimizer = cs.optim.in_backward(model, KINDS["sgd"], max_norm=0.1, norm_of="delayed")
    before = None
    for step in range(4):
        loss_of(ordinary, rank, step).backward()
        norm = cs.clip_grad_norm_(ordinary.parameters(), float("inf"))
        norm = whole(norm)
        if before is not None:
            for param in ordinary.parameters():
                param.grad.mul_(min(1.0, 0.1 / (before.item() + 1e-6)))
        loss_of(model, rank, step).backward()
        for each in (plain, optimizer):
            each.step()
            each.zero_grad()
        torch.testing.assert_close(optimizer.last_norm, norm)
        assert_alike(model, ordinary, exact=False)
        before = norm


def goes_on(rank, world, path):
    ordinary, model = models()
    optimizer = cs.optim.in_backward(model, KINDS["adamw"])
    for step in range(2):
        loss_of(model, rank, step).backward()
        optimizer.step()
    checkpoint.save(path, {"model": model, "optimizer": optimizer}, step=2)
    plain = KINDS["adamw"](list(ordinary.parameters()))
    again = cs.optim.in_backward(ordinary, KINDS["sgd"])
    again.remove_hooks()
    checkpoint.load(path, {"model": ordinary, "optimizer": plain})  # load into an ordinary optimizer, and back
    checkpoint.save(path, {"model": ordinary, "optimizer": plain}, step=3)
    _, other = models()
    third = cs.optim.in_backward(other, KINDS["adamw"])
    checkpoint.load(path, {"model": other, "optimizer": third})
    for step in range(2, 4):
        for net, each in ((model, optimizer), (ordinary, plain), (other, third)):
            loss_of(net, rank, step).backward()
            each.step()
            each.zero_grad()
    assert_alike(model, ordinary)
    assert_alike(model, other)


@distributed(world=2)
def test_checkpoints_equal_those_of_an_ordinary_optimizer(rank, world, tmp_path):
    goes_on(rank, world, tmp_path)


@pytest.mark.matrix
@simulated(world=2)
def test_a_state_dict_is_loaded_into_the_optimizer_that_steps(rank, world):
    one, two = models()
    optimizers = [cs.optim.in_backward(net, KINDS["adamw"]) for net in (one, two)]
    loss_of(one, rank, 0).backward()
    with torch.no_grad():
        for a, b in zip(one.parameters(), two.parameters(), strict=True):
            b.to_local().copy_(a.to_local())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for step in range(1, 3):
        for net, optimizer in zip((one, two), optimizers, strict=True):
            loss_of(net, rank, step).backward()
            optimizer.step()
        assert_alike(one, two)


@pytest.mark.matrix
def test_an_unsharded_model_steps_parameter_by_parameter():
    ordinary, model = models(lambda model: None)
    optimizers = [KINDS["adamw"](list(ordinary.parameters())), cs.optim.in_backward(model, KINDS["adamw"])]
    for net, optimizer in zip((ordinary, model), optimizers, strict=True):
        loss_of(net, 0, 0).backward()
        assert all(p.grad is None for p in net.parameters()) == (net is model)
        optimizer.step()
    assert_alike(model, ordinary)


@pytest.mark.parametrize("form", [lambda loss: loss, more(lambda loss: [loss])])
@simulated(world=2)
def test_a_grad_scaler_is_refused_with_the_reason_before_a_weight_changes(rank, world, form):
    untouched, model = models()
    optimizer = cs.optim.in_backward(model, KINDS["sgd"])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaled = scaler.scale(form(loss_of(model, rank, 0)))
    with pytest.raises(ShardConfigStateError, match="in_backward steps before that, with scaled gradients"):
        torch.autograd.backward(scaled)
    assert_alike(model, untouched)
    optimizer.zero_grad()
    with pytest.raises(ShardConfigStateError, match="train in bfloat16 without a scaler"):
        scaler.step(optimizer)
    ordinary = KINDS["sgd"](list(untouched.parameters()))
    for net, each in ((model, optimizer), (untouched, ordinary)):  # training continues without a scaler
        loss_of(net, rank, 1).backward()
        each.step()
        each.zero_grad()
    assert_alike(model, untouched)


@pytest.mark.parametrize("way", ["accumulating", "without synchronization", "both"])
@simulated(world=2)
def test_a_grad_scaler_is_refused_in_microbatches_before_a_weight_changes(rank, world, way):
    untouched, model = models()
    optimizer = cs.optim.in_backward(model, KINDS["adamw"])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    if way == "accumulating":  # in the first microbatch, although it steps nothing
        with optimizer.accumulating(), pytest.raises(ShardConfigStateError, match="with scaled gradients"):
            scaler.scale(loss_of(model, rank, 0)).backward()
    else:
        model.set_requires_gradient_sync(False)
        with optimizer.accumulating() if way == "both" else contextlib.nullcontext():
            scaler.scale(loss_of(model, rank, 0)).backward()
        model.set_requires_gradient_sync(True)
        with pytest.raises(ShardConfigStateError, match="with scaled gradients"):
            scaler.scale(loss_of(model, rank, 1)).backward()
    with pytest.raises(ShardConfigStateError, match="train in bfloat16 without a scaler"):
        scaler.step(optimizer)
    assert_alike(model, untouched)
    assert not optimizer.state


@simulated(world=2)
def test_scalers_of_other_models_and_disabled_scalers_are_accepted(rank, world):
    other, model = models()
    cs.optim.in_backward(model, KINDS["sgd"])
    scaler, off = torch.amp.GradScaler("cpu", init_scale=4.0), torch.amp.GradScaler("cpu", enabled=False)
    plain = KINDS["sgd"](list(other.parameters()))
    for step in range(2):
        scaler.scale(loss_of(other, rank, step)).backward()
        off.scale(loss_of(model, rank, step)).backward()
        scaler.step(plain)
        scaler.update()
        plain.zero_grad()
    assert_alike(model, other, exact=False)


class Counting(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        self.param_groups[0]["lr"] = 0.5 * self.param_groups[0]["lr"]


@pytest.mark.parametrize(("make", "options", "error", "match"), [
    (lambda params: torch.optim.LBFGS(params), {}, ShardConfigTypeError, "LBFGS calls the closure"),
    (lambda params: cs.optim.owned(torch.optim.AdamW, params), {}, ShardConfigTypeError, "`owned` steps when all"),
    (lambda params: params, {}, ShardConfigTypeError, "make: must return a torch.optim.Optimizer, but returned list"),
    (KINDS["sgd"], {"max_norm": -1.0}, ShardConfigValueError, "max_norm: must be positive"),
    (KINDS["sgd"], {"max_norm": float("nan")}, ShardConfigValueError, "max_norm: must be positive"),
    (KINDS["sgd"], {"max_norm": 1.0, "norm_of": "all"}, ShardConfigValueError, "norm_of: must be 'group' or 'delayed'"),
])  # fmt: skip
def test_invalid_arguments_are_refused(make, options, error, match):
    with pytest.raises(error, match=match):
        cs.optim.in_backward(Transformer(), make, **options)


def test_an_optimizer_that_counts_its_own_steps_is_refused():
    model = Transformer()
    cs.optim.in_backward(model, lambda params: Counting(params, lr=0.1))
    with pytest.raises(ShardConfigStateError, match=r"parameter head\.weight: Counting stores lr outside"):
        loss_of(model, 0, 0).backward()


def test_new_parameters_need_another_optimizer():
    optimizer = cs.optim.in_backward(Transformer(), KINDS["sgd"])
    with pytest.raises(ShardConfigStateError, match="its groups are those of `make`"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


@simulated(world=2)
def test_unsharded_parameters_are_stepped_after_the_last_microbatch(rank, world):
    """Their gradients do not show which microbatch is the last one."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.layer = nn.Parameter(torch.ones(())), nn.Linear(4, 4)

        def forward(self, x):
            return self.scale * self.layer(x)

    torch.manual_seed(0)
    plain = Scaled()
    model = copy.deepcopy(plain)
    cs.fully_shard(model, ignored_params={model.scale})
    optimizer = cs.optim.in_backward(model, lambda params: torch.optim.SGD(params, lr=0.1))
    ordinary = torch.optim.SGD(plain.parameters(), lr=0.1)
    for at in range(4):
        model.set_requires_gradient_sync(at % 2 == 1)
        x = torch.full((2, 4), at + 1.0)
        for each in (model, plain):
            each(x).square().mean().backward()
        if at % 2 == 0:
            assert model.scale.item() == plain.scale.item()
            continue
        for each in (optimizer, ordinary):
            each.step()
            each.zero_grad()
        torch.testing.assert_close(model.scale, plain.scale)
        torch.testing.assert_close(model.layer.weight.full_tensor(), plain.layer.weight)
