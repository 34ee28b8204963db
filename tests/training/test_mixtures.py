"""Groups of different parameters, experts that some ranks do not use, and two models in one program."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy

from _blocks import Transformer, token_batch
from _engines import ENGINES
from _pool import distributed, more, simulated
from _sides import assert_alike, models_of, noise, optimizers_of, shard_children, stack, train_alike
from _stepping import assert_at_rest, shard_whole

# ---- frozen and mixed


class LowRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 6).to(torch.bfloat16).requires_grad_(False)
        self.a, self.b = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x):
        return x + self.base(x.to(torch.bfloat16)).float() + self.b(self.a(x))


@pytest.mark.parametrize("shard", [shard_children, shard_whole])
@distributed(world=2)
def test_low_rank_adapters_train_on_a_frozen_base_of_another_dtype(rank, world, shard):
    models = models_of(lambda: nn.Sequential(LowRank(), LowRank()), shard)
    train_alike(models, lambda model, step: model(noise(3, 6, seed=step)).square().mean())


class Quantized(nn.Module):
    """A quantized linear layer: a frozen weight of bytes with a scale, and a trained bias."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.randint(0, 256, (7, 6), dtype=torch.uint8), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(7, 1), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(7))

    def forward(self, x):
        assert self.codes.dtype == torch.uint8
        return F.linear(x, (self.codes.to(x.dtype) - 128) / 128 * self.scale, self.bias)


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@distributed(world=2)
def test_quantized_weights_are_gathered_in_their_dtype(rank, world, param_dtype):
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    models = models_of(lambda: nn.Sequential(nn.Linear(4, 6), Quantized()), mp_policy=policy)

    def loss_of(model, step):
        return model(noise(3, 4, seed=step)).float().square().mean()

    if param_dtype is None:
        train_alike(models, loss_of)
        return
    losses = [loss_of(models[name], 0) for name in ENGINES]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for mine, theirs in zip(models["ours"].parameters(), models["fsdp2"].parameters(), strict=True):
        assert mine.dtype == theirs.dtype
        if mine.requires_grad:
            assert torch.equal(mine.grad.full_tensor(), theirs.grad.full_tensor())


# ---- experts


class Experts(nn.Module):
    """A layer that sends each row to one of four experts."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(4, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x, route):
        x = self.inp(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = route == number
            if rows.any():
                out[rows] = expert(x[rows])
        return out


@pytest.mark.parametrize("zeros", [False, True])
@distributed(world=2)
def test_experts_in_a_group_can_be_unused_on_some_ranks_and_steps(rank, world, zeros):
    models = models_of(Experts, shard_whole, fsdp2=False)
    models["ours"].set_reduce_scatter_unused_params(zeros)
    optimizers = optimizers_of(models)
    routes = [[[0, 1, 1], [2, 2, 1]], [[3, 3, 3], [3, 3, 3]], [[0, 0, 0], [1, 1, 1]]]  # step, rank, row
    for step, route in enumerate(routes):
        batches = [(noise(3, 4, seed=10 * step + r), torch.tensor(route[r])) for r in range(world)]
        models["ours"](*batches[rank]).square().mean().backward()
        (sum(models["plain"](*batch).square().mean() for batch in batches) / world).backward()
        for number, expert in enumerate(models["plain"].experts):
            used = any(number in row for row in route)
            mine = models["ours"].experts[number].weight.grad
            assert (mine is not None) is (used or zeros)
            if mine is not None and not used:
                assert not mine.full_tensor().any()
                expert.weight.grad, expert.bias.grad = torch.zeros_like(expert.weight), torch.zeros_like(expert.bias)
        for name, param in models["plain"].named_parameters():
            if param.grad is not None:
                torch.testing.assert_close(models["ours"].get_parameter(name).grad.full_tensor(), param.grad)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    assert_at_rest(models["ours"])


# ---- two models


@pytest.mark.parametrize("optimizers", [1, 2])
@distributed(world=2)
def test_a_generator_and_a_discriminator_train_together(rank, world, optimizers):
    pairs = models_of(lambda: nn.ModuleDict({"g": stack(3, 4), "d": stack(4, 1)}), shard_pair)

    def parameters(*models):
        return [p for model in models for p in model.parameters()]

    steppers = {}
    for name, pair in pairs.items():
        parts = [pair["g"], pair["d"]]
        lists = [parameters(*parts)] if optimizers == 1 else [parameters(part) for part in parts]
        steppers[name] = [torch.optim.SGD(params, lr=0.1) for params in lists]
    for step in range(3):
        for name, pair in pairs.items():
            of_d = steppers[name][-1]
            fake = pair["g"](noise(5, 3, seed=step))
            (pair["d"](fake.detach()).mean() - pair["d"](noise(5, 4, seed=9 + step)).mean()).backward()
            if optimizers == 2:
                of_d.step()
                of_d.zero_grad()
            (-pair["d"](fake).mean()).backward()  # the discriminator was updated, the generator was not
        assert_alike(pairs)
        for each in (optimizer for name in pairs for optimizer in steppers[name]):
            each.step()
            each.zero_grad()


def shard_pair(pair, engine):
    for model in pair.values():
        shard_children(model, engine)


@distributed(world=2)
def test_a_student_learns_from_a_sharded_teacher(rank, world):
    def make():
        pair = nn.ModuleDict({"teacher": stack(3, 4), "student": stack(3, 4)})
        pair["teacher"].requires_grad_(False).eval()
        return pair

    pairs = models_of(make, shard_pair)
    optimizers = optimizers_of(pairs)
    for step in range(3):
        for mode in (torch.no_grad, torch.enable_grad):
            for pair in pairs.values():
                with mode():
                    wanted = pair["teacher"](noise(5, 3, seed=step))
                (pair["student"](noise(5, 3, seed=step)) - wanted).square().mean().backward()
        assert_alike(pairs)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()


class Momentum(nn.Module):
    """A student and a momentum teacher, as in MoCo: each forward updates the teacher before it runs it."""

    def __init__(self):
        super().__init__()
        self.student = Transformer(dropout=0.0)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, tokens):
        logits = self.student(tokens)
        with torch.no_grad():
            for param, followed in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                param.mul_(0.5).add_(followed, alpha=0.5)
            wanted = self.teacher(tokens)
        return logits, wanted


def shard_both(model, engine, kept):
    for part in (model.student, model.teacher):
        for block in part.blocks:
            engine(block)
        engine(part)
    engine(model)
    if kept:
        for block in model.teacher.blocks:
            block.set_reshard_after_backward(False)


@pytest.mark.parametrize("kept", [False, more(True)])
@simulated(world=2)
def test_a_teacher_that_is_updated_in_forward_runs_with_its_new_weights(rank, world, kept):
    """The first block of the teacher is prefetched while the student's last block runs, so before the update."""
    models = models_of(Momentum, shard_both, kept=kept)
    optimizers = optimizers_of(models)
    for step in range(3):
        (tokens,) = token_batch(0, step)
        for model in models.values():
            logits, wanted = model(tokens)
            (logits - 2 * wanted).square().mean().backward()
        assert_alike(models)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        for model in models.values():
            with torch.no_grad():
                model(tokens)
        assert_alike(models)
