"""Writes to unsharded parameters: those that change no value train exactly, all others are errors."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import composable_shard as cs
from _blocks import Attention, SwiGLU, rotary
from _pool import distributed
from _sides import models_of, noise, optimizers_of, train_alike
from composable_shard._group.edits import bit_sums
from composable_shard.errors import SavedTensorModifiedError, StaleStateError
from composable_shard.testing import spmd

DIM, LENGTH = 16, 6


class Adapted(nn.Module):
    """Adds a low-rank update to a frozen weight during one forward, like PEFT's `target_parameters`."""

    def __init__(self, base, name):
        super().__init__()
        self.base, self.name, self.adapted = base, name, True
        rows, columns = getattr(base, name).shape
        getattr(base, name).requires_grad_(False)
        self.left, self.right = nn.Parameter(torch.randn(rows, 2) / 8), nn.Parameter(torch.randn(2, columns) / 8)

    def forward(self, x):
        if not self.adapted:
            return self.base(x)
        trains = getattr(self.base, self.name).requires_grad
        parametrize.register_parametrization(self.base, self.name, Added(self.left @ self.right))
        self.base.parametrizations[self.name].original.requires_grad_(trains)
        try:
            with parametrize.cached():
                return self.base(x)
        finally:
            parametrize.remove_parametrizations(self.base, self.name, leave_parametrized=False)


class Added(nn.Module):
    def __init__(self, update):
        super().__init__()
        self.update = update

    def forward(self, weight):
        return weight + self.update


class Writes(nn.Module):
    """A projection whose forward calls `write` on its weight."""

    def __init__(self, write):
        super().__init__()
        self.inner, self.write = nn.Linear(DIM, DIM), write

    @property
    def weight(self):
        return self.inner.weight

    def forward(self, x):
        if self.write is None:
            return self._scaled(x)
        with torch.no_grad():
            self.write(self.inner.weight)
        return self.inner(x)

    def _scaled(self, x):
        weight = self.inner.weight
        with torch.no_grad():
            weight.mul_(2)
        x = self.inner(x)
        with torch.no_grad():
            weight.div_(2)
        return x


class Block(nn.Module):
    """Attention and a feed-forward layer; its output projection is replaced by `projection`."""

    checkpointed = False

    def __init__(self, projection):
        super().__init__()
        self.attention, self.feed_forward = Attention(DIM, 4, 2, 0.0), SwiGLU(DIM, 24)
        self.projection = projection
        cos, sin = rotary(LENGTH, DIM // 4)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def _run(self, x):
        x = x + self.attention(x, self.cos, self.sin)
        return x + self.projection(self.feed_forward(x))

    def forward(self, x):
        if self.checkpointed and torch.is_grad_enabled():
            return checkpoint(self._run, x, use_reentrant=False)
        return self._run(x)


class Blocks(nn.Sequential):
    checkpoints_blocks = False

    def forward(self, x):
        for block in self:
            recomputes = self.checkpoints_blocks and torch.is_grad_enabled()
            x = checkpoint(block, x, use_reentrant=False) if recomputes else block(x)
        return x


def adapted():
    return Blocks(*[Block(Adapted(nn.Linear(DIM, DIM), "weight")) for _ in range(2)])


def writing(write):
    return lambda: Blocks(*[Block(Writes(write)) for _ in range(2)])


def shard_blocks(model, engine, **options):
    for block in model:
        engine(block, **options)
    engine(model, **options)


def loss_of(model, step):
    return model(noise(2, LENGTH, DIM, seed=step)).square().mean()


def train_and_evaluate(models, at_rest=True):
    optimizers = optimizers_of(models)
    train_alike(models, loss_of, 2, optimizers, at_rest=at_rest)
    x = noise(2, LENGTH, DIM, seed=9)
    for _ in range(2):
        with torch.no_grad():
            outputs = {name: model(x) for name, model in models.items()}
        for name, output in outputs.items():
            torch.testing.assert_close(output, outputs["plain"], msg=lambda m, n=name: f"output of {n}: {m}")
    train_alike(models, loss_of, 1, optimizers, at_rest=at_rest)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("reshard", [True, False])
@distributed(world=2)
def test_a_parametrization_during_a_forward_is_exact(rank, world, reshard, checkpointed, frozen):
    """With `frozen`, the second block has no parameter that trains; gradients go through it."""
    models = models_of(adapted, shard_blocks, reshard_after_forward=reshard)
    for model in models.values():
        if frozen:
            model[1].requires_grad_(False)
        for block in model:
            block.checkpointed = checkpointed
    train_and_evaluate(models)


def shard_compiled(model, engine):
    for block in model:
        engine(block)
        block.compile(backend="aot_eager")
    engine(model)


@pytest.mark.matrix
@distributed(world=2)
def test_a_parametrization_during_a_compiled_forward_is_exact(rank, world):
    """Dynamo breaks the graph there."""
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # Dynamo in FSDP2
    train_and_evaluate(models_of(adapted, shard_compiled))


@distributed(world=2)
def test_a_parametrization_after_forwards_without_it_is_exact(rank, world):
    """This happens if the model without its adapters is the reference model."""
    models = models_of(adapted, shard_blocks)
    for on in (False, True, False, True):
        for model in models.values():
            for block in model:
                block.projection.adapted = on
            with torch.no_grad():
                model(noise(2, LENGTH, DIM))
        for model in models.values():
            for block in model:
                block.projection.adapted = True
        train_alike(models, loss_of, 1)


@pytest.mark.parametrize("reshard", [True, False])
@distributed(world=2)
def test_a_parametrization_of_bfloat16_parameters_matches_fsdp2(rank, world, reshard):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models = models_of(adapted, shard_blocks, mp_policy=policy, reshard_after_forward=reshard)
    del models["plain"]
    models["plain"] = models.pop("fsdp2")
    for step in range(3):
        losses = {}
        for name, model in models.items():
            losses[name] = loss_of(model, step)
            losses[name].backward()
        assert torch.equal(losses["ours"], losses["plain"])
        for (name, own), other in zip(models["ours"].named_parameters(), models["plain"].parameters(), strict=True):
            if own.requires_grad:
                torch.testing.assert_close(
                    own.grad.full_tensor(), other.grad.full_tensor(), msg=lambda m, n=name: f"{n}: {m}"
                )
        for model in models.values():
            with torch.no_grad():
                for param in filter(lambda p: p.requires_grad, model.parameters()):
                    param.sub_(param.grad, alpha=0.1)
                model.zero_grad()
                model(noise(2, LENGTH, DIM))


def set_onto_itself(weight):
    weight.set_(weight)


HARMLESS = {
    "set onto itself": set_onto_itself,
    "times one": lambda weight: weight.mul_(1),
    "copied onto itself": lambda weight: weight.copy_(weight.clone()),
    "clamped": lambda weight: weight.clamp_(-100, 100),
    "normed": lambda weight: F.embedding(torch.tensor([0, 9]), weight, max_norm=100.0),
}


@pytest.mark.parametrize("write", HARMLESS)
@pytest.mark.parametrize("checkpoints", ["none", "in blocks", "around blocks"])
@pytest.mark.parametrize("reshard", [True, False])
@distributed(world=2)
def test_a_write_that_changes_nothing_is_exact(rank, world, write, checkpoints, reshard):
    models = models_of(writing(HARMLESS[write]), shard_blocks, fsdp2=False, reshard_after_forward=reshard)
    for model in models.values():
        model.checkpoints_blocks = checkpoints == "around blocks"
        for block in model:
            block.checkpointed = checkpoints == "in blocks"
    train_and_evaluate(models)


def rows_of(rank):
    return slice(rank * DIM // 2, (rank + 1) * DIM // 2)


def swap_two_rows(weight):
    weight.copy_(weight[[1, 0, *range(2, DIM)]])


def move_elsewhere(weight):
    weight.set_(weight.clone())


EDITS = {
    "rows of rank 0": lambda weight: weight[rows_of(0)].add_(1),
    "one number of rank 1": lambda weight: weight[DIM - 1, 3].mul_(1.001),
    "rows swapped": swap_two_rows,
    "set onto a copy": move_elsewhere,
    "a renormed row": lambda weight: F.embedding(torch.tensor([DIM - 1]), weight, max_norm=1e-3),
}


@pytest.mark.parametrize("harmless_first", [False, True])
@pytest.mark.parametrize("reshard", [True, False])
@distributed(world=2)
def test_an_edit_of_any_ranks_rows_is_an_error_on_all_ranks(rank, world, reshard, harmless_first):
    """This includes edits after writes without effect, and edits in evaluations."""
    models = models_of(writing(None), shard_blocks, fsdp2=False, reshard_after_forward=reshard)
    model, plain = models["ours"], models["plain"]
    for edit in EDITS.values():
        for grad in (True, False):
            for block in (*model, *plain):
                block.projection.write = set_onto_itself if harmless_first else lambda _: None
            loss_of(model, 0).backward()
            model.zero_grad()
            model[1].projection.write = edit
            with torch.set_grad_enabled(grad), pytest.raises(StaleStateError, match=r"^1\.projection\.inner\.weight: "):
                loss_of(model, 0)
    for block in model:
        block.projection.write = set_onto_itself
    assert torch.equal(loss_of(model, 1), loss_of(plain, 1))


@pytest.mark.parametrize("trains", [True, False])
@distributed(world=2)
def test_a_parameter_changed_and_restored_during_its_use_is_an_error(rank, world, trains):
    """The values are the original ones again, but the forward has computed with others."""
    ours = models_of(writing(None), shard_blocks, fsdp2=False)["ours"]
    ours[1].requires_grad_(trains)
    for at in (1, 0):  # backward reaches the second block first
        for _ in range(2):
            with pytest.raises(
                (StaleStateError, SavedTensorModifiedError), match=rf"{at}\.projection\.inner\.weight: "
            ):
                loss_of(ours, 0).backward()
        ours[1].projection.write = set_onto_itself


class WritesAndFails(Writes):
    """Changes its weight and raises, if `fails` is set."""

    fails = False

    def forward(self, x):
        if self.fails:
            with torch.no_grad():
                self.inner.weight.mul_(2)
            raise ValueError("out of luck")
        return self.inner(x)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("grad", [True, False])
@distributed(world=2)
def test_parameters_changed_by_a_failed_forward_are_gathered_again(rank, world, grad, pinned):
    models = models_of(lambda: nn.Sequential(*[Block(WritesAndFails(None)) for _ in range(2)]), shard_blocks,
                       fsdp2=False, reshard_after_forward=False)  # fmt: skip
    ours = models["ours"]
    loss_of(ours, 0).backward()
    ours.zero_grad()
    if pinned:
        ours[1].unshard()
    ours[1].projection.fails = True
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match="out of luck"):
        loss_of(ours, 0)
    ours[1].projection.fails = False
    train_and_evaluate(models)


@pytest.mark.parametrize("reshard", [True, False])
@distributed(world=2)
def test_a_write_without_effect_is_exact_with_kept_unsharded_storage(rank, world, reshard):
    """Autograd then saves the parameters themselves and compares versions."""

    def shard(model, engine):
        shard_blocks(model, engine, reshard_after_forward=reshard)
        model.set_keep_unsharded_storage(True)

    train_and_evaluate(models_of(writing(HARMLESS["times one"]), shard, fsdp2=False), at_rest=False)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("mine", [True, False])
def test_an_edit_on_only_one_rank_is_an_error(mine, first):
    """The edit changes rows of this rank or of the other one, as the first or a later write to the parameter."""
    rows = rows_of(0 if mine else 1)

    def train(model, write):
        for block in model:
            block.projection.write = write
        for step in range(2):
            loss_of(model, step).backward()

    def alone(world):
        model = models_of(writing(None), shard_blocks, fsdp2=False)["ours"]
        train(model, (lambda _: None) if first else set_onto_itself)
        train(model, lambda weight: weight[rows].add_(1) if world.rank == 0 else None)

    with pytest.raises(StaleStateError, match=r"^0\.projection\.inner\.weight: edited in place while unsharded"):
        spmd(2, timeout=60)(alone)


@distributed(world=2)
def test_a_write_without_effect_between_unshard_and_reshard_is_not_an_edit(rank, world):
    models = models_of(lambda: Block(nn.Linear(DIM, DIM)), lambda model, engine: engine(model), fsdp2=False)
    ours = models["ours"]
    for write in HARMLESS.values():
        ours.unshard()
        with torch.no_grad():
            write(ours.projection.weight)
        ours.reshard()
        ours.unshard()
        with torch.no_grad():
            ours.projection.weight[DIM - 1].add_(1)
        with pytest.raises(StaleStateError, match=r"projection\.weight"):
            ours.reshard()
        train_alike(models, loss_of, 1)


@distributed(world=2)
def test_only_a_late_first_write_needs_another_gather(rank, world):
    usual = 4  # gathers of two blocks, in forward and backward
    for late in (False, True):
        ours = models_of(adapted, shard_blocks, fsdp2=False)["ours"]
        counts = []
        for step in range(3):
            for block in ours:
                block.projection.adapted = not late or step > 0
            loss_of(ours, step).backward()
            counts.append(sum(action.kind == "UNSHARD" for action in cs.last_record(ours).actions))
        assert counts == [usual, usual + 2 * late, usual]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (3,), (5, 4), (2, 3, 7), (0, 4), (4, 0)])
def test_bit_sums_detect_a_change_of_one_number_and_an_exchange_of_rows(dtype, shape):
    memory = torch.zeros(3 + torch.Size(shape).numel(), dtype=dtype)
    for offset in (0, 1, 2, 3):  # in memory
        weight = memory[offset : offset + torch.Size(shape).numel()].view(shape)
        if weight.numel():
            weight.copy_((100 * torch.rand(shape, generator=torch.Generator().manual_seed(1))).to(dtype))
        before = bit_sums(weight)
        assert not bit_sums(weight).differ(before)
        for index in range(weight.numel()):
            changed = weight.clone()
            changed.view(-1)[index] += 1
            assert bit_sums(changed).differ(before)
        if weight.ndim > 1 and weight.shape[0] > 1 and weight.numel():
            assert bit_sums(weight.flip(0).contiguous()).differ(before)
