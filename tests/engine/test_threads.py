"""Threads: ranks that are threads of one process, and several threads that use one model."""

from __future__ import annotations

import contextlib
import copy
import threading

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.testing._internal.distributed import multi_threaded_pg
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch
from _pool import distributed, more

LIMIT_S = 120


def by_threads(world, body):
    """Run `body(rank, world)` on ranks that are threads, with the process group of torch's `MultiThreadedTestCase`."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    store, failed = dist.HashStore(), []

    def run(rank):
        dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
        try:
            body(rank, world)
        except BaseException as error:
            failed.append(error)
            ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert not any(thread.is_alive() for thread in threads)
    finally:
        ProcessLocalGroup.reset()
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    for error in failed:
        if not isinstance(error, SystemExit):  # raised in the other threads when one has failed
            raise error


HALF = cs.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
KINDS = {
    "plain": (2, {}, ()),
    "mixed precision": (2, {"mp_policy": HALF}, ()),
    "kept": (2, {"reshard_after_forward": False}, ()),
    "two of four": (4, {"reshard_after_forward": 2}, ()),
    "hsdp": (4, {}, (2, 2)),
}


def trained(model, shard, rank, options, prefetch):
    """Losses and gradients of four steps of two microbatches each."""
    for block in model.blocks if shard else ():
        shard(block, **options)
    if shard:
        shard(model, **options)
        first, second = model.blocks
        if prefetch:
            first.set_modules_to_forward_prefetch([second])
            second.set_modules_to_backward_prefetch([first])
    seen = []
    for param in model.parameters() if shard else ():
        param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.to_local().clone()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(4):
        for micro in range(2):
            if shard:
                model.set_requires_gradient_sync(micro == 1)
            loss = next_token_loss(model, *token_batch(rank, 2 * step + micro))
            loss.backward()
            found.append(loss.detach())
        found += [whole(p.grad) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    if shard:
        assert len(seen) == 4 * len(list(model.parameters()))
    return found


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


@pytest.mark.parametrize("prefetch", [pytest.param(False, id=""), more(True, id="prefetch")])
@pytest.mark.parametrize("kind", [more("hsdp"), *(kind for kind in KINDS if kind != "hsdp")])
def test_ranks_as_threads_of_torchs_threaded_group_train_as_under_fsdp2(kind, prefetch):
    world, options, shape = KINDS[kind]
    torch.manual_seed(0)
    base = Transformer(tied=kind == "plain")

    def body(rank, world):
        mesh = init_device_mesh("cpu", shape or (world,), mesh_dim_names=("replicate", "shard")[-len(shape or (1,)) :])
        found = {}
        for name, shard in {"fsdp2": fsdp2, "ours": cs.fully_shard}.items():
            found[name] = trained(copy.deepcopy(base), shard, rank, {"mesh": mesh, **options}, prefetch)
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if "mp_policy" in options else {"rtol": 1e-4, "atol": 1e-5}
        for theirs, ours in zip(found["fsdp2"], found["ours"], strict=True):
            torch.testing.assert_close(ours, theirs, **tolerance)
        if "mp_policy" not in options and not rank:
            check_unsharded(base, world, found["ours"])

    by_threads(world, body)


def check_unsharded(base, world, ours):
    """Check that the first loss and gradients are those of the unsharded model for all ranks' mean loss."""
    model = copy.deepcopy(base)
    losses = [next_token_loss(model, *token_batch(rank, micro)) for rank in range(world) for micro in range(2)]
    torch.testing.assert_close(ours[0], losses[0].detach())
    (sum(losses) / world).backward()
    for gradient, param in zip(ours[2:], model.parameters(), strict=False):
        torch.testing.assert_close(gradient, param.grad, rtol=1e-4, atol=1e-5)


def test_threads_with_two_models_and_optimizers_each_do_not_affect_each_other():
    torch.manual_seed(0)
    base = Transformer(layers=1)

    def body(rank, world):
        teacher, student = (cs.fully_shard(copy.deepcopy(base)) for _ in range(2))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1 * (1 + k)) for k, m in enumerate((teacher, student))]
        plain = [copy.deepcopy(base) for _ in range(2)]
        theirs = [torch.optim.SGD(m.parameters(), lr=0.1 * (1 + k)) for k, m in enumerate(plain)]
        for step in range(3):
            for k, model in enumerate((teacher, student)):
                next_token_loss(model, *token_batch(rank, step + k)).backward()
                (sum(next_token_loss(plain[k], *token_batch(r, step + k)) for r in range(world)) / world).backward()
            for optimizer in (*optimizers, *theirs):
                optimizer.step()
                optimizer.zero_grad()
        for k, model in enumerate((teacher, student)):
            for mine, its in zip(model.parameters(), plain[k].parameters(), strict=True):
                torch.testing.assert_close(mine.full_tensor(), its, rtol=1e-4, atol=1e-5)

    by_threads(2, body)


def test_different_plans_of_ranks_as_threads_are_an_error():
    def body(rank, world):
        model = cs.fully_shard(nn.Linear(4, 4), reshard_after_forward=bool(rank))
        with pytest.raises(cs.errors.RankMismatchError, match="have different plans"):
            model(torch.ones(1, 4))

    by_threads(2, body)


class Wrapped(ProcessLocalGroup):
    """A third-party process group that implements only what FSDP2 uses."""

    def broadcast(self, *args):
        raise NotImplementedError

    all_gather_single_coalesced = allgather_into_tensor_coalesced = send = recv = alltoall = broadcast


def test_a_process_group_with_only_the_methods_that_fsdp2_uses_works():
    torch.manual_seed(0)
    base = Transformer(layers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multi_threaded_pg, "ProcessLocalGroup", Wrapped)

        def body(rank, world):
            assert type(dist.group.WORLD) is Wrapped
            model = cs.fully_shard(copy.deepcopy(base))
            loss = next_token_loss(model, *token_batch(rank, 0))
            loss.backward()
            torch.testing.assert_close(loss, next_token_loss(base, *token_batch(rank, 0)))
            assert "packed" in str(cs.make_plan(model))

        by_threads(2, body)


# ---- several threads that use one model


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.inside = 0
        self.most = 0
        self.others_are_out = threading.Event()

    def forward(self, x):
        self.inside += 1
        self.most = max(self.most, self.inside)
        assert self.others_are_out.wait(30)
        self.inside -= 1
        return self.lin(x)


@pytest.mark.parametrize("ran", [False, True], ids=["first forward", "later"])
@distributed(world=1)
def test_all_but_one_of_the_threads_that_enter_a_model_together_get_an_error(rank, world, ran):
    from composable_shard._engine import iterations as _iterations
    from composable_shard._module import build as _module

    model = cs.fully_shard(Gate())
    if ran:
        model.others_are_out.set()
        model(torch.ones(2, 4)).sum().backward()
        model.others_are_out.clear()
    count = 4
    start, told, done = threading.Barrier(count), [], []
    where = (_iterations.Iterations, "claim") if ran else (_module, "build_engine")
    kept = getattr(*where)

    def all_meet_here(*args, **kwargs):  # each thread has checked, and none has begun
        result = kept(*args, **kwargs) if ran else None
        with contextlib.suppress(threading.BrokenBarrierError):
            start.wait(0.5)
        return result if ran else kept(*args, **kwargs)

    def run():
        try:
            done.append(model(torch.ones(2, 4)))
        except cs.errors.ShardConfigStateError as error:
            told.append(str(error))
            if len(told) == count - 1:
                model.others_are_out.set()

    setattr(*where, all_meet_here)
    try:
        threads = [threading.Thread(target=run) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    finally:
        setattr(*where, kept)
    assert (len(done), len(told)) == (1, count - 1), told
    assert all("run a model in one thread at a time" in text for text in told)
    assert model.most == 1
    done[0].sum().backward()
    assert model.lin.weight.grad is not None
    model(torch.ones(2, 4)).sum().backward()  # all claims were released


@distributed(world=1)
def test_forward_backward_and_the_next_step_may_each_run_in_a_separate_thread(rank, world):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = copy.deepcopy(plain)
    cs.fully_shard(model[0])
    cs.fully_shard(model)
    failed = []

    def in_thread(function):
        def run():
            try:
                function()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(30)
        assert not failed, failed

    for _ in range(3):
        losses = []
        in_thread(lambda losses=losses: losses.append(model(torch.ones(2, 4)).square().sum()))
        in_thread(lambda losses=losses: losses[0].backward())
    for _ in range(3):
        plain(torch.ones(2, 4)).square().sum().backward()
    assert torch.equal(model[0].weight.grad.full_tensor(), plain[0].weight.grad)
