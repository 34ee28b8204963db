"""Edge cases in which a sharded model was once silently wrong, or left in a broken state."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import composable_shard
from _models import Stack, vectors
from _pool import distributed
from composable_shard import fully_shard


class Branches(nn.Module):
    """Two Linears in one group; a call uses either of them, or both."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)

    def forward(self, x, use):
        return sum(getattr(self, name)(x).sum() for name in use)


def twins(make=Stack):
    torch.manual_seed(0)
    sharded, plain = make(), make()
    plain.load_state_dict(sharded.state_dict())
    return sharded, plain


@distributed(world=2)
def test_a_parameter_used_by_one_rank_gets_its_gradient_on_all_ranks(rank, world):
    model, plain = twins(Branches)
    fully_shard(model)
    x = torch.ones(2, 4)
    model(x, "ab" if rank == 0 else "a").backward()
    plain(x, "ab").backward()
    torch.testing.assert_close(model.a.weight.grad.full_tensor(), plain.a.weight.grad, rtol=0, atol=0)
    torch.testing.assert_close(model.b.weight.grad.full_tensor(), plain.b.weight.grad / world, rtol=0, atol=0)


@distributed(world=2)
def test_a_parameter_that_no_rank_uses_has_no_gradient(rank, world):
    model = Branches()
    fully_shard(model)
    model(torch.ones(2, 4), "a").backward()
    assert model.a.weight.grad is not None
    assert model.b.weight.grad is None


@distributed(world=2)
def test_accumulated_gradients_are_reduced_even_if_the_last_microbatch_does_not_use_the_group(rank, world):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, both):
            return self.b(self.a(x)).sum() if both else self.a(x).sum()

    model, plain = twins(Two)
    for child in (model.a, model.b, model):
        fully_shard(child)
    x = torch.full((2, 4), float(rank + 1))
    model.set_requires_gradient_sync(False)
    model(x, True).backward()
    model.set_requires_gradient_sync(True)
    model(x, False).backward()
    for r in range(world):
        each = torch.full((2, 4), float(r + 1))
        (plain(each, True) + plain(each, False)).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad / world, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("kind", ["post-accumulate", "tensor"])
@distributed(world=(1, 2))
def test_parameter_hooks_are_called_once_per_backward_with_the_sum_of_all_uses(rank, world, kind):
    model, plain = twins(lambda: nn.Linear(4, 4, bias=False))
    fully_shard(model)
    seen = []
    if kind == "tensor":
        model.weight.register_hook(lambda grad: seen.append(grad.full_tensor()))
    else:
        model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.full_tensor()))
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    model(model(x)).sum().backward()
    plain(plain(x)).sum().backward()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], plain.weight.grad)
    torch.testing.assert_close(model.weight.grad.full_tensor(), plain.weight.grad)


@distributed(world=(1, 2))
def test_an_in_place_update_between_forwards_is_detected(rank, world):
    updates = [
        lambda p: p.mul_(0.5),
        lambda p: p.to_local().mul_(0.5),
        lambda p: torch._foreach_mul_([p], 0.5),
    ]
    for update in updates:
        model, plain = twins()
        composable_shard.shard_by_class(model, {type(model.blocks[0])}, strategy="zero2")
        model(*vectors(rank, 0))  # leaves weights unsharded for a possible backward
        with torch.no_grad():
            for p, q in zip(list(shards_of(model)), plain.parameters(), strict=True):
                update(p)
                q.mul_(0.5)
        torch.testing.assert_close(model(*vectors(rank, 0)), plain(*vectors(rank, 0)), rtol=0, atol=0)


def shards_of(model):
    for state in composable_shard._module.state.states_below(model):
        state.release()
    return model.parameters()


@distributed(world=(1, 2))
def test_a_weight_returned_as_output_keeps_its_value_without_gradients(rank, world):
    class Gives(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.arange(4.0))

        def forward(self):
            return self.weight

    model = nn.ModuleList([Gives(), Gives()])
    for each in model:
        fully_shard(each, reshard_after_forward=True)
    with torch.no_grad():
        first = model[0]()
        model[1]()
    torch.testing.assert_close(first.detach(), torch.arange(4.0), rtol=0, atol=0)


@distributed(world=(1, 2))
def test_unshard_before_the_first_forward_does_not_make_a_module_the_root(rank, world):
    model, plain = twins()
    composable_shard.shard_by_class(model, {type(model.blocks[0])})
    model.blocks[0].unshard()
    torch.testing.assert_close(model(*vectors(rank, 0)), plain(*vectors(rank, 0)), rtol=0, atol=0)


@distributed(world=(1, 2))
def test_a_late_wait_for_an_unshard_does_not_gather_again(rank, world):
    model = Stack()
    fully_shard(model, reshard_after_forward=True)
    handle = model.unshard(async_op=True)
    model(*vectors(rank, 0))
    handle.wait()
    assert all(isinstance(p, DTensor) for p in model.parameters())


@distributed(world=(1, 2))
def test_replacing_a_sharded_parameter_with_a_plain_one_is_an_error_each_time(rank, world):
    model, plain = twins()
    fully_shard(model)
    model(*vectors(rank, 0))
    model.reshard()
    kept = model.inp.weight
    model.inp.weight = nn.Parameter(torch.zeros(kept.shape))
    for _ in range(2):
        with pytest.raises(composable_shard.errors.ShardConfigStateError, match=r"inp\.weight"):
            model(*vectors(rank, 0))
    model.inp.weight = kept
    torch.testing.assert_close(model(*vectors(rank, 0)), plain(*vectors(rank, 0)), rtol=0, atol=0)


@distributed(world=(1, 2))
def test_running_out_of_memory_in_a_gather_leaves_the_model_usable(rank, world):
    model, plain = twins()
    composable_shard.shard_by_class(model, {type(model.blocks[0])})
    model(*vectors(rank, 0))
    engine = next(iter(composable_shard._module.state.states_below(model))).bound.engine
    lease = engine.pool.lease

    def fails(*args, **kwargs):
        raise torch.OutOfMemoryError("no memory")

    engine.pool.lease = fails
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        model(*vectors(rank, 0))
    engine.pool.lease = lease
    out = model(*vectors(rank, 0))
    torch.testing.assert_close(out, plain(*vectors(rank, 0)), rtol=0, atol=0)
    out.sum().backward()
    assert all(isinstance(p, DTensor) for p in model.parameters())


@distributed(world=(1, 2))
def test_the_record_of_an_iteration_is_available_while_its_loss_is_alive(rank, world):
    model = Stack()
    composable_shard.shard_by_class(model, {type(model.blocks[0])})
    lengths = []
    for _ in range(4):
        loss = model(*vectors(rank, 0)).sum()
        loss.backward()
        lengths.append(len(composable_shard.last_record(model).actions))
    assert len(set(lengths)) == 1


@distributed(world=(1, 2))
def test_a_list_group_with_one_member_in_a_reentrant_checkpoint_is_exact(rank, world):
    class Mixed(nn.Module):
        def __init__(self, checkpointed):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.checkpointed = checkpointed

        def forward(self, x):
            x = self.a(x)
            if self.checkpointed:
                return torch.utils.checkpoint.checkpoint(self.b, x, use_reentrant=True)
            return self.b(x)

    torch.manual_seed(0)
    model = Mixed(True)
    plain = Mixed(False)
    plain.load_state_dict(model.state_dict())
    fully_shard([model.a, model.b])
    fully_shard(model)
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(3))
    for _ in range(2):
        for each in (model, plain):
            each.zero_grad()
            each(x).square().sum().backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=lambda m, name=name: f"{name}: {m}")


_to_call = []


@torch.library.custom_op("composable_shard_tests::call", mutates_args=())
def _call(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return _to_call[-1](x).clone()


@distributed(world=2)
def test_training_works_after_a_first_forward_in_a_custom_operator(rank, world):
    torch.manual_seed(0)
    plain, model = Stack(), Stack()
    model.load_state_dict(plain.state_dict())
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    _to_call.append(model)
    assert torch.equal(torch.ops.composable_shard_tests.call(*vectors(0, 0)), plain(*vectors(0, 0)))
    for each in (plain, model):
        each(*vectors(0, 1)).square().mean().backward()
    for name, param in plain.named_parameters():
        assert torch.equal(model.get_parameter(name).grad.full_tensor(), param.grad), name


@distributed(world=2)
def test_a_module_without_parameters_may_run_before_its_root(rank, world):
    own = fully_shard(nn.Identity())
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), own))
    own(torch.ones(2, 8))
    model(torch.ones(2, 8)).sum().backward()
    assert model[0].weight.grad is not None


@distributed(world=2)
def test_a_module_whose_call_failed_before_forward_may_run_in_its_root(rank, world):
    def refuse(module, args):
        raise ValueError("refused")

    layer = fully_shard(nn.Linear(8, 8))
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), layer))
    hook = layer.register_forward_pre_hook(refuse, prepend=True)
    with pytest.raises(ValueError, match="refused"):
        layer(torch.ones(2, 8))
    hook.remove()
    model(torch.ones(2, 8)).sum().backward()
    assert layer.weight.grad is not None
