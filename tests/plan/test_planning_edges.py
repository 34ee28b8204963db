"""Planning edge cases: forwards on single ranks, blocks that join later, steps that cannot be measured, failures."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import composable_shard as cs
from _engines import fully_shard
from _models import Stack, shard_blocks, vectors
from _pool import distributed
from _stepping import engine_of

P = cs.PrefetchPolicy


class Chosen(nn.Module):
    """A root with blocks. Each forward runs the blocks in the order `taken`."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inp = nn.Linear(4, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor, taken: tuple[int, ...] = (0, 1, 2, 3)) -> torch.Tensor:
        x = self.inp(x)
        for at in taken:
            x = torch.tanh(self.blocks[at](x))
        return x


def made(prefetch=None, pool=None, **options):
    torch.manual_seed(0)
    model = Chosen()
    plain = Chosen()
    plain.load_state_dict(model.state_dict())
    shard_blocks(model, fully_shard, **options)
    if prefetch is not None:
        model.set_prefetch_policy(prefetch)
    if pool is not None:
        model.set_pool_policy(pool)
    return model, plain


def train(model, plain, steps, **how):
    for step in range(steps):
        for each in (model, plain):
            each.zero_grad()
            each(*vectors(0, step), **how).square().mean().backward()
        for name, param in plain.named_parameters():
            grad = model.get_parameter(name).grad
            assert (grad is None) == (param.grad is None), name
            if grad is not None:
                torch.testing.assert_close(grad.full_tensor(), param.grad)


@distributed(world=2)
def test_with_ddp_a_single_rank_may_evaluate(rank, world):
    torch.manual_seed(0)
    model = Stack()
    shard_blocks(model, fully_shard, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    if rank == 0:
        with torch.no_grad():
            model(*vectors(0, 0))
    model(*vectors(rank, 0)).square().mean().backward()
    assert all(param.grad is not None for param in model.parameters())


@distributed(world=4)
def test_experts_may_have_different_names_on_each_rank(rank, world):
    """With expert parallelism, each rank may build only its own experts. All ranks have the dense parameters."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    expert = f"expert{mesh.get_local_rank('ep')}"
    torch.manual_seed(0)
    model = nn.ModuleDict({"dense": nn.Linear(4, 4), expert: nn.Linear(4, 4)})
    model = Wrapped(model, expert)
    fully_shard(model.parts[expert], mesh=mesh["dp"])
    fully_shard(model.parts["dense"], mesh=init_device_mesh("cpu", (4,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    for step in range(2):
        model(*vectors(rank, step)).square().mean().backward()
    assert all(param.grad is not None for param in model.parameters())


class Wrapped(nn.Module):
    def __init__(self, parts: nn.ModuleDict, expert: str) -> None:
        super().__init__()
        self.parts = parts
        self.expert = expert

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts[self.expert](self.parts["dense"](x))


@distributed(world=2)
def test_prefetching_stays_within_the_budget_in_unplanned_steps(rank, world):
    one_ahead = cs.make_plan(made()[0]).peak_bytes
    model, plain = made(P.depth(3), cs.PoolPolicy(budget=one_ahead))
    for taken in ((0, 1, 2, 3), (0, 1, 2, 0), (3, 3, 1), (2,), (3, 2, 1, 0), (0, 1, 2, 3)):
        train(model, plain, 2, taken=taken)
    assert engine_of(model).pool.peak_bytes <= one_ahead


@distributed(world=2)
def test_auto_measures_again_when_a_block_joins(rank, world):
    model, plain = made(P.auto())
    train(model, plain, 5, taken=(0, 1))
    assert cs.make_plan(model).costs is not None
    train(model, plain, 2)  # ranks see the block in the first step and agree on it at the end of the second step
    assert cs.make_plan(model).costs is None
    train(model, plain, 5)
    assert {fqn for fqn, _ in cs.make_plan(model).costs.forward} == {"", *(f"blocks.{at}" for at in range(4))}


@distributed(world=2)
def test_auto_warns_and_stops_if_too_few_steps_can_be_measured(rank, world):
    model, plain = made(P.auto())
    train(model, plain, 2)
    for each in (model, plain):
        each.blocks[1].requires_grad_(False)
    with pytest.warns(UserWarning, match="PrefetchPolicy.auto: 1 of 8 steps ran the forwards"):
        train(model, plain, 12)
    assert not engine_of(model)._actions.recorder.watch
    assert cs.make_plan(model).costs is None


@pytest.mark.parametrize("frozen", [6, 7])
@distributed(world=2)
def test_auto_measures_one_more_step_if_the_last_try_succeeds(rank, world, frozen):
    model, plain = made(P.auto())
    train(model, plain, 1)
    for trains, steps in ((False, frozen), (True, 4)):
        for each in (model, plain):
            each.blocks[1].requires_grad_(trains)
        train(model, plain, steps)
    assert cs.make_plan(model).costs is not None


@distributed(world=2)
def test_a_users_watch_continues_after_measurements_end(rank, world):
    model, plain = made(P.auto())
    cs.watch(model)
    train(model, plain, 7)
    assert cs.make_plan(model).costs is not None
    assert cs.last_record(model).spans
    assert cs.stats(model)["step/compute_ms"] > 0


@distributed(world=2)
def test_an_invalid_plan_changes_nothing(rank, world):
    model, plain = made(P.depth(2))
    train(model, plain, 2)
    before = cs.make_plan(model)
    schedule = dataclasses.replace(before.effective_schedule(), kept=("nope",))
    for changes in ({"order": ("nope",)}, {"schedule": schedule}):
        with pytest.raises((cs.errors.ShardConfigValueError, StopIteration)):
            model.set_plan(dataclasses.replace(before, **changes))
        assert cs.make_plan(model) is before
    train(model, plain, 1)
    with pytest.raises(cs.errors.ShardConfigValueError, match="max_reductions=0"):
        dataclasses.replace(before.effective_schedule(), max_reductions=0)


@distributed(world=1)
def test_a_parameter_that_is_registered_later_raises(rank, world):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    model[0].bias = nn.Parameter(torch.zeros(4))
    with pytest.raises(cs.errors.ShardConfigStateError, match=r"0\.bias: were added after fully_shard"):
        model(torch.ones(2, 4))


@pytest.mark.parametrize("name", ["reduce_scatter", "all_gather"])
@distributed(world=2)
def test_a_collective_that_fails_to_issue_leaks_no_memory(rank, world, name):
    model, plain = made()
    train(model, plain, 2)
    pool, transport = engine_of(model).pool, engine_of(model).groups[1]._comm.transports.gather
    held = pool.held_bytes
    works = getattr(transport, name)

    def fails(*args, **kwargs):
        raise RuntimeError("no such luck")

    setattr(transport, name, fails)
    with pytest.raises(RuntimeError, match="no such luck"):
        model(*vectors(0, 0)).sum().backward()
    setattr(transport, name, works)
    train(model, plain, 2)
    assert pool.live_bytes == 0
    assert (pool.held_bytes, pool.fallbacks) == (held, {})


@distributed(world=1)
def test_prefetch_lists_with_modules_of_another_model_raise(rank, world):
    model, plain = made()
    other, _ = made()
    model.blocks[0].set_modules_to_forward_prefetch([other.blocks[1]])
    with pytest.raises(
        cs.errors.ShardConfigValueError, match=r"modules to prefetch: the module with .*weight, .* has another root"
    ):
        model(*vectors(0, 0))
    model, plain = made()
    train(model, plain, 1)
    other(*vectors(0, 0))
    for name in ("forward", "backward"):
        with pytest.raises(cs.errors.ShardConfigValueError, match=r"modules to prefetch"):
            getattr(model.blocks[0], f"set_modules_to_{name}_prefetch")([model.blocks[1], other.blocks[1]])
    train(model, plain, 1)


class Meeting(nn.Module):
    """Blocks in its forward until the test sets `goes_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.begun.set()
        assert self.goes_on.wait(30)
        return self.lin(x)


@pytest.mark.parametrize("reentrant", [False, True])
@distributed(world=1)
def test_activation_checkpointing_of_the_root_recomputes_in_any_backward_thread(rank, world, reentrant):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    for _ in range(2):
        loss = checkpoint(model, torch.ones(2, 4, requires_grad=True), use_reentrant=reentrant).sum()
        failed = []

        def backward(loss=loss, failed=failed):
            try:
                loss.backward()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
        assert not failed
    assert all(param.grad is not None for param in model.parameters())


@distributed(world=1)
def test_a_second_thread_that_uses_a_running_model_raises(rank, world):
    model = Meeting()
    fully_shard(model)
    outputs = []
    first = threading.Thread(target=lambda: outputs.append(model(torch.ones(2, 4))))
    first.start()
    assert model.begun.wait(30)
    with pytest.raises(
        cs.errors.ShardConfigStateError, match="thread 'MainThread': calls a sharded model while another thread"
    ):
        model(torch.ones(2, 4))
    model.goes_on.set()
    first.join()
    outputs[0].sum().backward()
    assert all(param.grad is not None for param in model.parameters()), "the first thread is not affected"
    model(torch.ones(2, 4)).sum().backward()
