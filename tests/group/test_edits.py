"""Unsharded parameters that are edited in place, and views of them that users keep: exact, or an error."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from _blocks import Transformer, next_token_loss, token_batch
from _engines import fully_shard
from _leases import lease
from _pool import simulated
from _sides import assert_alike, models_of, noise, optimizers_of
from _stepping import pool_of
from composable_shard.errors import SavedTensorModifiedError, StaleStateError

MODIFIED = r"modified by an in-?place operation"


class Edits(nn.Module):
    """Two projections with one weight, which `edit` may change before, between or after them."""

    edit_at = -1

    def __init__(self):
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 6)

    def edit(self):
        with torch.no_grad():
            self.weight.mul_(2)

    def forward(self, x):
        for at in range(3):
            if at == self.edit_at:
                self.edit()
            if at < 2:
                x = torch.tanh(self.other(x @ self.weight))
        return x


class ThroughAView(Edits):
    def edit(self):
        with torch.no_grad():
            self.weight.t()[1:].add_(1)


class ForEach(Edits):
    def edit(self):
        with torch.no_grad():
            torch._foreach_mul_([self.weight, self.other.weight], 2)


class AuxiliaryLoss(Edits):
    """Backward starts at an auxiliary loss on the module and does not pass the output."""

    def forward(self, x):
        self.left = torch.tanh(self.other(x) @ self.weight).sum()
        self.edit()
        return x


def stack(kind):
    return nn.Sequential(*[kind() for _ in range(2)])


def shard_all(model, engine, reshard):
    for block in model:
        engine(block, reshard_after_forward=reshard)
    engine(model, reshard_after_forward=reshard)


def loss_of(model, step=0):
    return model(noise(3, 6, seed=step)).square().mean()


def go_on_exactly(models):
    """Train for two steps without edits, after errors."""
    optimizers = optimizers_of(models)
    for step in range(2):
        for model in models.values():
            model.zero_grad()
            loss_of(model, step).backward()
        assert_alike(models)
        for optimizer in optimizers.values():
            optimizer.step()


@pytest.mark.parametrize("kind", [Edits, ThroughAView, ForEach])
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("reshard", [True, False])
@simulated(world=2)
def test_a_forward_that_edits_its_parameters_is_an_error(rank, world, kind, at, reshard):
    """Without sharding the edit stays, and backward raises an error if the parameter was saved before it."""
    models = models_of(lambda: stack(kind), shard_all, fsdp2=False, reshard=reshard)
    ours = models["ours"]
    names = "weight, other.weight" if kind is ForEach else "weight"
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        ours[1].edit_at = at
        with mode(), pytest.raises(StaleStateError, match=rf"{_of_block_1(names)}: edited in place while unsharded"):
            loss_of(ours)
        ours[1].edit_at = -1
        assert all(isinstance(param, DTensor) for param in ours.parameters())
    go_on_exactly(models)


def _of_block_1(names):
    return ", ".join(f"1.{name}" for name in names.split(", ")).replace(".", r"\.")


@simulated(world=2)
def test_an_edit_is_an_error_if_backward_does_not_pass_the_output(rank, world):
    models = models_of(lambda: stack(AuxiliaryLoss), shard_all, fsdp2=False, reshard=True)
    with pytest.raises(StaleStateError, match=r"0\.weight: edited in place"):
        loss_of(models["ours"])


@pytest.mark.parametrize("how", ["weight", "view", "frozen"])
@simulated(world=2)
def test_an_edit_of_unsharded_parameters_between_forward_and_backward_is_an_error(rank, world, how):
    models = models_of(lambda: stack(Edits), shard_all, reshard=False)
    for model in models.values():
        if how == "frozen":
            for param in model[1].parameters():
                param.requires_grad_(False)
        for step in range(3):  # an error has no effect on later steps
            loss = loss_of(model, step)
            if step != 1:
                loss.backward()
                continue
            with torch.no_grad():
                (model[1].weight[0] if how == "view" else model[1].weight).mul_(2)
            with pytest.raises(RuntimeError, match=MODIFIED):
                loss.backward()
            if model is models["plain"]:
                with torch.no_grad():
                    (model[1].weight[0] if how == "view" else model[1].weight).div_(2)


@pytest.mark.parametrize("then", ["forward", "reshard", "step"])
@simulated(world=2)
def test_a_manual_edit_of_unsharded_parameters_is_an_error_before_it_is_lost(rank, world, then):
    models = models_of(lambda: stack(Edits), shard_all, fsdp2=False, reshard=True)
    go_on_exactly(models)
    ours = models["ours"]
    (optimizer,) = optimizers_of({"ours": ours}).values()
    ours[0].unshard()
    ours[0].edit()
    lose = {"forward": lambda: loss_of(ours), "reshard": ours[0].reshard, "step": optimizer.step}
    with pytest.raises(StaleStateError, match=r"0\.weight: edited in place while unsharded"):
        lose[then]()
    for model in models.values():
        model.zero_grad()
    go_on_exactly(models)


@simulated(world=2)
def test_an_edit_of_a_parameter_that_backward_does_not_read_is_an_error(rank, world):
    models = models_of(lambda: stack(Edits), shard_all, fsdp2=False, reshard=False)
    ours = models["ours"]
    loss = loss_of(ours)
    with torch.no_grad():
        ours[1].other.bias.add_(1)
    with pytest.raises(StaleStateError, match=r"1\.other\.bias: edited in place while unsharded"):
        loss.backward()
    ours.zero_grad()
    go_on_exactly(models)


def double(weight):
    with torch.no_grad():
        weight.mul_(2)


def edit_before_the_forward(model):
    model[1].unshard()
    double(model[1].weight)
    return loss_of(model)


def edit_in_the_forward_of_an_earlier_module(model):
    model[1].unshard()
    hook = model[0].register_forward_hook(lambda *_: double(model[1].weight))
    loss = loss_of(model)
    hook.remove()
    return loss


def edit_after_the_forward(model):
    loss = loss_of(model)
    model[1].unshard()
    double(model[1].weight)
    return loss


def edit_between_two_backwards(model):
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    model[1].unshard()
    double(model[1].weight)
    return loss


KEPT = [edit_before_the_forward, edit_in_the_forward_of_an_earlier_module]
EITHER = [edit_after_the_forward, edit_between_two_backwards]


@pytest.mark.parametrize(
    ("edit", "reshard"),
    [*((edit, False) for edit in KEPT), *((edit, each) for edit in EITHER for each in (True, False))],
)
@simulated(world=2)
def test_the_error_for_an_edit_after_unshard_lists_all_times_when_it_may_have_happened(rank, world, edit, reshard):
    """Backward detects an edit but not its time, so the message includes edits before the forward, too."""
    models = models_of(lambda: stack(Edits), shard_all, fsdp2=False, reshard=reshard)
    go_on_exactly(models)
    ours = models["ours"]
    loss = edit(ours)
    with pytest.raises(SavedTensorModifiedError) as caught:
        loss.backward()
    message = str(caught.value)
    assert message.startswith(
        "parameter 1.weight: its unsharded copy was modified by an in-place operation between its gather and backward "
    )
    assert "(in forward, after forward, or after unshard())" in message
    with contextlib.suppress(StaleStateError):  # the edit is lost here, unless backward has resharded already
        ours[1].reshard()
    for model in models.values():
        model.zero_grad()
    go_on_exactly(models)


@simulated(world=2)
def test_the_error_lists_a_manual_write_to_sharded_parameters_as_a_cause(rank, world):
    models = models_of(lambda: stack(Edits), shard_all, fsdp2=False, reshard=True)
    ours = models["ours"]
    loss = loss_of(ours)
    double(ours[1].weight)  # sharded, because the forward of its block has ended
    with pytest.raises(StaleStateError, match=r"1\.weight.*an optimizer, a load or a write to the sharded parameters"):
        loss.backward()


class Caches(nn.Module):
    """Keeps a view of its weight in the first forward."""

    def __init__(self, view):
        super().__init__()
        self.weight, self.view, self.kept = nn.Parameter(torch.randn(6, 6)), view, None

    def forward(self, x):
        if self.kept is None:
            self.kept = [self.view(self.weight)]
        return torch.tanh(x @ self.weight)


VIEWS = {
    "transposed": torch.Tensor.t,
    "row": lambda w: w[0],
    "detached": torch.Tensor.detach,
    "data": lambda w: w.data,
}


def overwrite(model):
    """Overwrite all memory that the pool would lease to others."""
    pool = pool_of(model)
    others = [lease(pool, size) for size, free in list(pool._free.items()) for _ in list(free)]
    others += [pool.lease(request) for request in list(pool._known) if request not in pool._live]
    for slot in others:
        slot.typed(torch.uint8, written=True).fill_(255)
    for slot in others:
        pool.release(slot)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@simulated(world=2)
def test_a_view_cached_without_gradients_never_shows_other_data(rank, world, mode, view):
    torch.manual_seed(3)
    model = nn.Sequential(*[Caches(VIEWS[view]) for _ in range(4)])
    want = [VIEWS[view](block.weight.detach().clone()) for block in model]
    shard_all(model, fully_shard, True)
    with mode():
        for step in range(3):
            model(noise(3, 6, seed=step))
            overwrite(model)
            assert all(torch.equal(block.kept[0], it) for block, it in zip(model, want, strict=True))
        for block in model:
            block.kept = []
        model(noise(3, 6))
        model(noise(3, 6))
    assert pool_of(model).live_bytes == 0, "no memory stays reserved without views"
    model(noise(3, 6)).sum().backward()


@simulated(world=2)
def test_a_view_taken_after_unshard_never_shows_other_data(rank, world):
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)])
    want = model[0].weight.detach().clone().t()
    shard_all(model, fully_shard, True)
    model(noise(3, 6)).sum().backward()
    model[0].unshard()
    kept = model[0].weight.t()
    model[0].reshard()
    for _ in range(2):
        with torch.no_grad():
            model(noise(3, 6))
        overwrite(model)
        assert torch.equal(kept, want)
    del kept
    with torch.no_grad():
        model(noise(3, 6))
    assert pool_of(model).live_bytes == 0


@simulated(world=2)
def test_outputs_that_are_views_of_parameters_reserve_no_memory(rank, world):
    class Gives(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))

        def forward(self):
            return self.weight[1:], {"all": self.weight.t()}

    model = Gives()
    want = model.weight.detach().clone()
    fully_shard(model, reshard_after_forward=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            part, both = model()
        assert pool_of(model).live_bytes == 0
        overwrite(model)
        assert torch.equal(part, want[1:])
        assert torch.equal(both["all"], want.t())


@pytest.mark.parametrize("reshard", [True, False])
@simulated(world=2)
def test_alternating_training_and_evaluation_raises_no_edit_error(rank, world, reshard):
    models = models_of(lambda: Transformer(dropout=0.1), shard_blocks, reshard=reshard)
    optimizers = optimizers_of(models)
    for step in range(4):
        for name, model in models.items():
            if name != "plain":
                model.blocks[0].unshard()
            torch.manual_seed(step)
            next_token_loss(model, *token_batch(0, step)).backward()
            with torch.no_grad():
                next_token_loss(model, *token_batch(0, step))
            for module in model.modules() if name != "plain" else ():  # FSDP2 does not reshard after evaluations
                if hasattr(module, "reshard"):
                    module.reshard()
        assert_alike(models)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()


def shard_blocks(model, engine, reshard):
    for block in model.blocks:
        engine(block, reshard_after_forward=reshard)
    engine(model, reshard_after_forward=reshard)
