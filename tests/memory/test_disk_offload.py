"""Optimizers with state on disk give bitwise identical results and stay within their memory limit."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import composable_shard as cs
from _blocks import next_token_loss, token_batch
from _offloading import assert_same, decoder, local, train
from _pool import distributed, more
from composable_shard import checkpoint, testing
from composable_shard._group import optimizers
from composable_shard._memory import disk
from composable_shard._memory.disk import BLOCK

LEAST = 5 * BLOCK  # enough for the state of any parameter of these decoders


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread. With tensors of this size, threads on a busy machine mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


class Counting(torch.optim.Optimizer):
    """An unusual optimizer: it counts in its param groups, replaces state in each step, and keeps gradients."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                before = state.get("mean", torch.zeros_like(param))
                state["mean"] = before + param.grad / group["k"]
                state["gradient"] = param.grad
                if group["k"] == 3:
                    state["more"] = torch.full_like(param, 0.5)
                param.sub_(state["mean"] + state.get("more", 0), alpha=group["lr"])


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW foreach amsgrad": (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    "Adam with a tensor for lr": (torch.optim.Adam, {"lr": torch.tensor(0.01)}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "Counting": (Counting, {}),
}


@pytest.mark.parametrize("memory", [LEAST, more(64 << 20)])
@pytest.mark.parametrize(
    "name", [name if name in ("AdamW fused", "Adafactor", "Counting") else more(name) for name in OPTIMIZERS]
)
def test_optimizers_of_torch_give_the_same_result_as_in_memory(tmp_path, name, memory):
    make, options = OPTIMIZERS[name]
    sides = []
    for policy in (None, cs.DiskOffloadPolicy(tmp_path, memory)):
        model = decoder(shard=False)
        optimizer = make(model.parameters(), **options)
        if policy is not None:
            assert cs.optim.offload_optimizer(optimizer, policy) is optimizer
            assert isinstance(optimizer, make)
        train(model, optimizer, range(5))
        sides.append((model, optimizer))
    assert_same(*sides)
    assert sides[1][1]._keeper.workspace.most <= memory
    on_disk = sum(v.nbytes for s in sides[0][1].state.values() for v in s.values() if torch.is_tensor(v) and v.dim())
    assert on_disk <= sum(file.used for file in sides[1][1]._keeper.files._files)
    assert sides[0][1].param_groups[0].get("k") == sides[1][1].param_groups[0].get("k")


def in_groups(model):
    decayed = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() <= 1]
    return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 1e-2}], fused=True)


@distributed(world=2)
def test_sharded_training_with_groups_schedules_clipping_and_frozen_layers_matches_memory(rank, world, tmp_path):
    sides = []
    for policy in (None, cs.DiskOffloadPolicy(tmp_path, LEAST)):
        model = decoder(policy, tied=True)
        model.blocks[1].requires_grad_(False)
        optimizer = in_groups(model)
        if policy is not None:
            cs.optim.offload_optimizer(optimizer)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
        for step in range(5):
            if step == 3:  # these parameters get their state later
                model.blocks[1].requires_grad_(True)
            next_token_loss(model, *token_batch(rank, step)).backward()
            cs.clip_grad_norm_(model.parameters(), 0.5)
            if step == 2:  # one layer has no gradients
                for param in model.blocks[0].parameters():
                    param.grad = None
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        sides.append((model, optimizer))
    assert_same(*sides)
    assert sides[1][1]._keeper.workspace.most <= LEAST
    assert os.listdir(tmp_path) == []


@distributed(world=2)
def test_gradients_accumulate_and_closures_run_once(rank, world, tmp_path):
    sides = []
    for policy in (None, cs.DiskOffloadPolicy(tmp_path, LEAST)):
        model = decoder(policy)
        optimizer = torch.optim.AdamW(model.parameters())
        if policy is not None:
            cs.optim.offload_optimizer(optimizer)
        runs = []

        def closure(model=model, optimizer=optimizer, runs=runs):
            optimizer.zero_grad()
            for part in range(2):
                loss = next_token_loss(model, *token_batch(rank, len(runs) + 10 * part))
                loss.backward()
            runs.append(loss)
            return loss

        for _ in range(3):
            assert optimizer.step(closure) is runs[-1]
        assert len(runs) == 3
        sides.append((model, optimizer))
    assert_same(*sides)


@distributed(world=2)
def test_checkpoints_restore_the_state_after_a_restart(rank, world, tmp_path):
    policy = cs.DiskOffloadPolicy(tmp_path / "disk", LEAST)
    plain = decoder()
    in_memory = in_groups(plain)
    train(plain, in_memory, range(2), rank)

    model = decoder(policy)
    optimizer = cs.optim.offload_optimizer(in_groups(model))
    train(model, optimizer, range(2), rank)
    checkpoint.save(tmp_path / "saved", {"model": model, "optimizer": optimizer}, step=2)
    full = cs.checkpoint.full_optimizer_state_dict(model, optimizer)
    train(model, optimizer, range(5, 7), rank)  # the current state differs from the saved state
    train(plain, in_memory, range(2, 4), rank)

    for fresh in (True, False):
        if fresh:
            del optimizer, model
            model = decoder(policy)
            optimizer = cs.optim.offload_optimizer(in_groups(model))
        checkpoint.load(tmp_path / "saved", {"model": model, "optimizer": optimizer})
        assert all(is_mapped(value) for value in tensors_of(optimizer))
        train(model, optimizer, range(2, 4), rank)
        assert_same((plain, in_memory), (model, optimizer))

    for load in (cs.checkpoint.load_full_optimizer_state_dict, None):
        model = decoder(policy)
        optimizer = cs.optim.offload_optimizer(in_groups(model))
        checkpoint.load(tmp_path / "saved", {"model": model})
        if load is not None:
            load(model, optimizer, full if rank == 0 else None, broadcast_from_rank0=True)
        else:
            checkpoint.load(tmp_path / "saved", {"model": model, "optimizer": optimizer})
        train(model, optimizer, range(2, 4), rank)
        assert_same((plain, in_memory), (model, optimizer))


def tensors_of(optimizer):
    return [local(v) for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v) and v.dim()]


def is_mapped(tensor):
    """Whether the memory of a tensor is mapped from a file."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return "(deleted)" in line
    return tensor.numel() == 0


@distributed(world=2)
def test_torch_functions_for_state_dicts_work(rank, world, tmp_path):
    policy = cs.DiskOffloadPolicy(tmp_path, LEAST)
    plain, model, other = decoder(), decoder(policy), decoder(policy)
    in_memory = in_groups(plain)
    both = [cs.optim.offload_optimizer(in_groups(each)) for each in (model, other)]
    train(plain, in_memory, range(2), rank)
    train(model, both[0], range(2), rank)
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, both[1], get_optimizer_state_dict(model, both[0]))
    train(plain, in_memory, range(2, 4), rank)
    train(other, both[1], range(2, 4), rank)
    assert_same((plain, in_memory), (other, both[1]))

    content = copy.deepcopy(both[1].state_dict())
    train(plain, in_memory, range(4, 5), rank)
    train(other, both[1], range(4, 5), rank)
    model.load_state_dict(plain.state_dict())
    both[0].load_state_dict(in_memory.state_dict())  # from memory to disk
    assert_same((plain, in_memory), (model, both[0]))
    in_memory.load_state_dict(copy.deepcopy(content))  # and back
    both[1].load_state_dict(content)
    train(plain, in_memory, range(5, 6), rank)
    train(other, both[1], range(5, 6), rank)
    assert_same((plain, in_memory), (other, both[1]))


def test_edits_of_state_between_steps_take_effect(tmp_path):
    sides = []
    for policy in (None, cs.DiskOffloadPolicy(tmp_path, LEAST)):
        model = decoder(shard=False)
        optimizer = torch.optim.AdamW(model.parameters())
        if policy is not None:
            cs.optim.offload_optimizer(optimizer, policy)
        for step in range(4):
            train(model, optimizer, [step])
            state = optimizer.state[
                model.blocks[1].ffn.up.weight if hasattr(model.blocks[1], "ffn") else model.head.weight
            ]
            state["exp_avg"].mul_(0.25)  # in the mapped pages
            state["exp_avg_sq"] = state["exp_avg_sq"] * 2  # a new tensor
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(300))]})
        optimizer.param_groups[1]["params"][0].grad = torch.ones(300)
        train(model, optimizer, [4, 5])
        sides.append((model, optimizer))
    assert_same(*sides)
    added = [optimizer.param_groups[1]["params"][0] for _, optimizer in sides]
    assert torch.equal(*added)


@distributed(world=2)
def test_optimizers_with_one_policy_share_directory_and_memory(rank, world, tmp_path):
    policy = cs.DiskOffloadPolicy(tmp_path, LEAST)
    plain, model, second = decoder(), decoder(policy), decoder(policy)
    expected = torch.optim.AdamW(plain.parameters())
    blocks = [param for name, param in model.named_parameters() if name.startswith("blocks")]
    others = [param for name, param in model.named_parameters() if not name.startswith("blocks")]
    parts = [cs.optim.offload_optimizer(torch.optim.AdamW(params)) for params in (blocks, others)]
    whole = cs.optim.offload_optimizer(torch.optim.AdamW(second.parameters()))
    assert parts[0]._keeper.workspace is parts[1]._keeper.workspace is whole._keeper.workspace
    for step in range(3):
        train(plain, expected, [step], rank)
        train(second, whole, [step], rank)
        next_token_loss(model, *token_batch(rank, step)).backward()
        for each in parts:
            each.step()
            each.zero_grad()
    assert_same((plain, expected), (second, whole))
    for param, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(local(param), local(other))
    assert whole._keeper.workspace.most <= LEAST


class Meeting(torch.optim.SGD):
    """An optimizer that communicates for each parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for index, param in enumerate(group["params"]):
                if param.grad is not None:
                    shape = torch.tensor(param.shape)
                    total = torch.cat([shape, -shape])
                    dist.all_reduce(total, dist.ReduceOp.MAX)
                    assert torch.equal(total, torch.cat([shape, -shape])), "another rank steps a different parameter"
                    self.state[param].setdefault("mean", torch.zeros_like(param)).add_(param.grad)
                    param.sub_(self.state[param]["mean"], alpha=0.01 + 0 * index)


@pytest.mark.parametrize("late", [2, 3])  # the parameter that gets state after the others
@distributed(world=2)
def test_steps_that_communicate_stay_aligned_across_ranks(rank, world, tmp_path, late):
    torch.manual_seed(0)
    sizes = [(1, 4000), (700, 3), (1, 4000), (3, 900), (1, 5), (501, 7)]  # some shards are empty
    start = [torch.randn(size) for size in sizes]
    sides = []
    for policy in (None, cs.DiskOffloadPolicy(tmp_path, 8 * BLOCK)):
        model = nn.Module()
        model.params = nn.ParameterList(nn.Parameter(each.clone()) for each in start)
        model.forward = lambda model=model: sum(param.square().sum() for param in model.params)
        model.params[late].requires_grad_(False)
        cs.fully_shard(model, offload_policy=policy or cs.OffloadPolicy())
        optimizer = Meeting(model.parameters(), lr=0.1)
        if policy is not None:
            cs.optim.offload_optimizer(optimizer)
        for step in range(6):
            model.params[late].requires_grad_(step > 1)
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:  # load larger state, which moves to other places on disk
                state = copy.deepcopy(optimizer.state_dict())
                for each in state["state"].values():
                    each["more"] = torch.zeros_like(each["mean"])
                optimizer.load_state_dict(state)
        sides.append((model, optimizer))
    assert_same(*sides)


@pytest.mark.parametrize("direct", [False, True])
def test_file_systems_without_direct_io_or_unnamed_files_work(tmp_path, monkeypatch, direct):
    opened = os.open

    def refusing(path, flags, *args, **kwargs):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no unnamed files")
        if flags & os.O_DIRECT and not direct:
            raise OSError(errno.EINVAL, "no direct I/O")
        return opened(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    sides = []
    for policy in (None, cs.DiskOffloadPolicy(tmp_path, LEAST)):
        model = decoder(shard=False)
        optimizer = torch.optim.AdamW(model.parameters())
        if policy is not None:
            cs.optim.offload_optimizer(optimizer, policy)
        train(model, optimizer, range(3))
        sides.append((model, optimizer))
    assert_same(*sides)
    assert os.listdir(tmp_path) == []
    assert (sides[1][1]._keeper.files._files[0]._direct is not None) is direct


# ---- memory


def test_the_error_for_too_little_memory_states_the_least_that_works(tmp_path):
    def stepped(memory):
        model = decoder(shard=False)
        optimizer = cs.optim.offload_optimizer(
            torch.optim.AdamW(model.parameters()), cs.DiskOffloadPolicy(tmp_path, memory)
        )
        train(model, optimizer, range(2))
        return optimizer

    with pytest.raises(
        cs.errors.PoolBudgetError, match=r"the state of parameter 0 of group 0 has .* set memory to at least"
    ) as error:
        stepped(BLOCK)
    assert error.value.least > BLOCK
    assert stepped(error.value.least)._keeper.workspace.most == error.value.least
    with pytest.raises(cs.errors.PoolBudgetError):
        stepped(error.value.least - BLOCK)


MEASURED = """
    import sys, re, torch, composable_shard as cs

    torch.set_num_threads(1)

    def resident():
        status = open("/proc/self/status").read()
        return sum(int(kib) << 10 for kib in re.findall(r"Rss(?:Anon|Shmem):\\s+(\\d+)", status))

    def run(count, offload=lambda optimizer: optimizer):
        params = [torch.nn.Parameter(torch.full((1 << 20,), float(index))) for index in range(count)]
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer = offload(torch.optim.AdamW(params, fused=True))
        before, most = resident(), [0]
        for step in range(3):
            optimizer.step()
            most.append(resident() - before)
        return max(most), sum(float(param.double().sum()) for param in params)

    policy = cs.DiskOffloadPolicy(sys.argv[1], int(sys.argv[2]))
    run(1, lambda optimizer: cs.optim.offload_optimizer(optimizer, policy))  # its first step loads other memory, too
    print(*run(16, lambda optimizer: cs.optim.offload_optimizer(optimizer, policy)), *run(16))
"""


@pytest.mark.matrix
def test_resident_memory_stays_within_the_limit_with_much_larger_state(tmp_path):
    memory = 32 << 20
    command = [sys.executable, "-c", textwrap.dedent(MEASURED), str(tmp_path), str(memory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    most, total, most_in_memory, expected = map(float, done.stdout.split())
    assert most_in_memory > 16 * (8 << 20) - memory  # the state in memory first reuses the freed memory of the ring
    assert memory // 2 < most < memory + (4 << 20)
    assert total == expected


@pytest.mark.parametrize("seed", range(8))
def test_leases_of_a_ring_never_overlap(seed):
    generator = torch.Generator().manual_seed(seed)
    ring, leases = disk.Ring(16 * BLOCK), []
    for _ in range(400):
        nbytes = BLOCK * int(torch.randint(1, 9 if len(leases) % 3 else 17, (1,), generator=generator))
        begin = ring.lease(nbytes)
        if begin is None:
            assert leases, "an empty ring has space for every request"
            leases.pop(0)
            ring.give_back()
            continue
        assert 0 <= begin <= ring.capacity - nbytes
        assert all(begin + nbytes <= first or last <= begin for first, last in leases)
        leases.append((begin, begin + nbytes))
        assert ring.leased == sum(last - first for first, last in leases) <= ring.most <= ring.capacity


def test_state_is_prefetched_and_written_back_in_parameter_order(tmp_path, monkeypatch):
    params = [nn.Parameter(torch.ones(1024)) for _ in range(6)]  # each has a state of two blocks
    for param in params:
        param.grad = torch.ones_like(param)
    policy = cs.DiskOffloadPolicy(tmp_path, 6 * BLOCK)
    optimizer = cs.optim.offload_optimizer(torch.optim.AdamW(params), policy)
    optimizer.step()
    log = []

    def noting(word):
        moved = getattr(disk.Ring, word)

        def move(ring, begin, run, threads):
            log.append(f"{word} {run.offset // (2 * BLOCK)}")
            return moved(ring, begin, run, threads)

        return move

    for word in ("read", "write"):
        monkeypatch.setattr(disk.Ring, word, noting(word))
    keeper = optimizer._keeper
    step_unit = keeper._step_unit
    monkeypatch.setattr(keeper, "_step_unit", lambda *args: (log.append("step"), step_unit(*args))[1])
    optimizer.step()
    assert log[:5] == ["read 0", "read 1", "read 2", "step", "write 0"]
    for word in ("read", "write"):
        assert [line for line in log if line.startswith(word)] == [f"{word} {number}" for number in range(6)]
    assert keeper.workspace.most == 6 * BLOCK


def test_files_and_memory_are_freed_with_the_optimizer(tmp_path):
    before = descriptors()
    model = decoder(shard=False)
    optimizer = cs.optim.offload_optimizer(torch.optim.AdamW(model.parameters()), cs.DiskOffloadPolicy(tmp_path, LEAST))
    train(model, optimizer, range(2))
    assert descriptors() > before
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    del optimizer, model
    assert descriptors() == before
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


# ---- failures


@contextlib.contextmanager
def full_disk(monkeypatch, writes):
    """A disk that is full after `writes` writes. Reservations succeed, as on copy-on-write file systems."""
    pwrite, left = os.pwrite, [writes]

    def write(descriptor, data, offset):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", write)
    yield
    monkeypatch.undo()


@pytest.mark.parametrize("writes", [0, 3])
def test_a_full_disk_raises_and_the_state_is_not_used_again(tmp_path, monkeypatch, writes):
    model = decoder(shard=False)
    optimizer = cs.optim.offload_optimizer(torch.optim.AdamW(model.parameters()), cs.DiskOffloadPolicy(tmp_path, LEAST))
    train(model, optimizer, range(2))
    with full_disk(monkeypatch, writes), pytest.raises(cs.errors.OffloadError, match=r"the disk is full .* free space"):
        train(model, optimizer, [2])
    for use in (optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict({})):
        with pytest.raises(cs.errors.OffloadError, match=r"state was lost .* load a checkpoint"):
            use()
    assert not optimizer.state
    with pytest.raises(cs.errors.OffloadError, match="state was lost"):
        checkpoint.save(tmp_path / "saved", {"model": model, "optimizer": optimizer}, step=1)
    assert checkpoint.latest(tmp_path / "saved") is None


def test_a_reservation_on_a_full_file_system_raises(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("this machine mounts nothing")
    try:
        model = decoder(shard=False)
        optimizer = cs.optim.offload_optimizer(
            torch.optim.AdamW(model.parameters()), cs.DiskOffloadPolicy(tmp_path, LEAST)
        )
        with pytest.raises(
            cs.errors.OffloadError, match=r"the disk is full \([\d,]+ bytes are free there\) and reserving"
        ):
            train(model, optimizer, range(2))
        del optimizer
        gc.collect()
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_a_failed_read_raises(tmp_path, monkeypatch):
    model = decoder(shard=False)
    optimizer = cs.optim.offload_optimizer(torch.optim.AdamW(model.parameters()), cs.DiskOffloadPolicy(tmp_path, LEAST))
    train(model, optimizer, range(2))
    broken = OSError(errno.EIO, os.strerror(errno.EIO))
    monkeypatch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(broken))
    with pytest.raises(cs.errors.OffloadError, match=r"reading .* bytes failed: .*error"):
        train(model, optimizer, [2])
    with pytest.raises(cs.errors.OffloadError, match="state was lost"):
        optimizer.step()


@pytest.mark.parametrize("kind", ["a file", "not ours"])
def test_an_unusable_directory_raises_before_the_first_step(tmp_path, monkeypatch, kind):
    place = tmp_path / "place"
    if kind == "a file":
        place.write_text("")
    else:
        monkeypatch.setattr(Path, "mkdir", lambda *_, **__: (_ for _ in ()).throw(PermissionError(errno.EACCES, "no")))
    optimizer = torch.optim.AdamW(decoder(shard=False).parameters())
    with pytest.raises(cs.errors.OffloadError, match=f"{place}: creating a file failed"):
        cs.optim.offload_optimizer(optimizer, cs.DiskOffloadPolicy(place, LEAST))
    assert type(optimizer) is torch.optim.AdamW


def train_and_save(folder, offload, resumes=False, dies_at=None):
    """Run five steps, with a checkpoint after the third. In the fourth, the process may be killed during a write."""
    model = decoder(shard=False)
    optimizer = torch.optim.AdamW(model.parameters())
    if offload:
        cs.optim.offload_optimizer(optimizer, cs.DiskOffloadPolicy(f"{folder}/disk", LEAST))
    state = {"model": model, "optimizer": optimizer}
    begin = checkpoint.load(f"{folder}/saved", state).step if resumes else 0
    for step in range(begin, 5):
        if step == 3 and dies_at is not None:
            die_in_write(dies_at)
        train(model, optimizer, [step])
        if step == 2 and dies_at is not None:
            checkpoint.save(f"{folder}/saved", state, step=3)
    return model, optimizer


def die_in_write(number):
    """Make this process kill itself when half of a write is on disk."""
    pwrite, writes = os.pwrite, [0]

    def dying(descriptor, data, offset):
        writes[0] += 1
        if writes[0] == number + 1:
            pwrite(descriptor, memoryview(data)[: len(data) // 2 // BLOCK * BLOCK], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return pwrite(descriptor, data, offset)

    os.pwrite = dying


@pytest.mark.parametrize("dies_at", [2, more(0), more(5)])
def test_a_run_killed_during_a_write_leaves_no_files_and_resumes_from_its_checkpoint(tmp_path, dies_at):
    here = Path(__file__).parent
    call = f"import sys; sys.path[:0] = ['{here.parent}', '{here}']; import torch, test_disk_offload as t; "
    call += f"torch.set_num_threads(1); t.train_and_save('{tmp_path}', True, dies_at={dies_at})"
    killed = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert os.listdir(tmp_path / "disk") == []  # nothing that another run could read
    resumed, whole = train_and_save(tmp_path, True, resumes=True), train_and_save(tmp_path, False)
    assert_same(resumed, whole)


def test_a_step_that_fails_loses_the_state(tmp_path):
    model = decoder(shard=False)
    optimizer = torch.optim.AdamW(model.parameters())
    cs.optim.offload_optimizer(optimizer, cs.DiskOffloadPolicy(tmp_path, LEAST))
    train(model, optimizer, range(2))
    optimizer.state[model.head.weight]["step"] = None  # makes the step of the class fail
    with pytest.raises(RuntimeError, match="singleton tensors"):
        train(model, optimizer, [2])
    with pytest.raises(cs.errors.OffloadError, match="state was lost"):
        optimizer.state_dict()


# ---- mistakes


class Nested(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            self.state[param]["past"] = [param.grad.clone()]


class Apart(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        self.state["all"] = {"steps": self.state.get("all", {"steps": 0})["steps"] + 1}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Nested, r"state 'past' of parameter 0 of group 0 is a list of tensors; only tensors can be stored on disk"),
        (Apart, r"has state for 'all', which is not a parameter"),
    ],
)
def test_optimizers_that_do_not_step_parameters_independently_raise(tmp_path, make, message):
    model = decoder(shard=False)
    optimizer = cs.optim.offload_optimizer(make(model.parameters(), lr=0.1), cs.DiskOffloadPolicy(tmp_path, LEAST))
    with pytest.raises(TypeError, match=message):
        train(model, optimizer, [0])


@distributed(world=1)
def test_a_forgotten_or_repeated_offload_optimizer_raises(rank, world, tmp_path):
    policy = cs.DiskOffloadPolicy(tmp_path, LEAST)
    model = decoder(policy)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(
        cs.errors.ShardConfigStateError, match=r"call cs.optim.offload_optimizer\(optimizer\) before the first step"
    ):
        train(model, optimizer, [0])
    assert not optimizer.state
    cs.optim.offload_optimizer(optimizer)
    with pytest.raises(cs.errors.ShardConfigStateError, match="already offloaded"):
        cs.optim.offload_optimizer(optimizer)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(cs.errors.ShardConfigTypeError, match="its state is offloaded, so it cannot be"):
            copied(optimizer)
    scheduled = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.ConstantLR(scheduled)
    with pytest.raises(cs.errors.ShardConfigStateError, match="call offload_optimizer first, then create schedulers"):
        cs.optim.offload_optimizer(scheduled)


@distributed(world=2)
def test_parameters_that_are_materialized_or_replaced_keep_their_policy(rank, world, tmp_path):
    policy = cs.DiskOffloadPolicy(tmp_path, LEAST)
    expected = decoder()
    in_memory = torch.optim.AdamW(expected.parameters())
    start = {name: value.clone() for name, value in expected.state_dict().items()}
    train(expected, in_memory, range(3), rank)
    with torch.device("meta"):
        model = decoder(policy)
    model.to_empty(device="cpu")
    model.cos.copy_(expected.cos)
    model.sin.copy_(expected.sin)
    model.load_state_dict(start)
    optimizer = cs.optim.offload_optimizer(torch.optim.AdamW(model.parameters()))
    train(model, optimizer, range(3), rank)
    assert_same((expected, in_memory), (model, optimizer))
    assert all(map(is_mapped, tensors_of(optimizer)))
    assert sum(map(len, map(optimizers.state_of_optimizers, [[param] for param in model.parameters()]))) == 0

    model.load_state_dict({name: value.clone() for name, value in start.items()}, assign=True)
    forgotten = torch.optim.AdamW(model.parameters())
    with pytest.raises(
        cs.errors.ShardConfigValueError, match=r"none of its parameters .* or policy= to offload_optimizer"
    ):
        cs.optim.offload_optimizer(forgotten)
    with pytest.raises(cs.errors.ShardConfigStateError, match=r"embed.weight was sharded with DiskOffloadPolicy"):
        train(model, forgotten, [0])
    for param in model.parameters():
        param.grad = None
    optimizer = cs.optim.offload_optimizer(
        forgotten
    )  # the groups have found the replaced parameters in the last forward
    train(model, optimizer, range(3), rank)
    assert_same((expected, in_memory), (model, optimizer))


@distributed(world=2)
def test_a_load_with_too_little_memory_fails_on_all_ranks(rank, world, tmp_path):
    model = decoder()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, [0], rank)
    checkpoint.save(tmp_path / "saved", {"model": model, "optimizer": optimizer}, step=1)
    policy = cs.DiskOffloadPolicy(tmp_path, LEAST if rank == 0 else BLOCK)
    other = torch.optim.AdamW(model.parameters())
    cs.optim.offload_optimizer(other, policy)
    with pytest.raises(
        cs.errors.ShardConfigValueError, match=r"rank 1: DiskOffloadPolicy.memory: .* set memory to at least"
    ):
        checkpoint.load(tmp_path / "saved", {"model": model, "optimizer": other})
    assert not other.state


@distributed(world=1)
def test_missing_invalid_and_conflicting_policies_raise(rank, world, tmp_path):
    model = decoder()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(cs.errors.ShardConfigValueError, match="none of its parameters was sharded with a policy"):
        cs.optim.offload_optimizer(optimizer)
    with pytest.raises(cs.errors.ShardConfigTypeError, match="expected an OffloadPolicy, got str"):
        cs.optim.offload_optimizer(optimizer, "disk")
    with pytest.raises(cs.errors.ShardConfigTypeError, match="each parameter independently, got LBFGS"):
        cs.optim.offload_optimizer(torch.optim.LBFGS(model.parameters()), cs.DiskOffloadPolicy(tmp_path, LEAST))
    with pytest.raises(cs.errors.ShardConfigTypeError, match="expected one of torch's optimizers"):
        cs.optim.offload_optimizer(model)
    two = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    for index, each in enumerate(two):
        cs.fully_shard(each, offload_policy=cs.DiskOffloadPolicy(tmp_path, LEAST << index))
    with pytest.raises(
        cs.errors.ShardConfigValueError, match=r"weight was sharded with DiskOffloadPolicy.* pass policy= to"
    ):
        cs.optim.offload_optimizer(torch.optim.AdamW(two.parameters()))
    for kept in (cs.CPUOffloadPolicy(), cs.OffloadPolicy(), cs.HostOffloadPolicy()):
        assert type(cs.optim.offload_optimizer(optimizer, kept)) is torch.optim.AdamW


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"directory": 3, "memory": 1}, TypeError, "directory=3: expected a path"),
        ({"directory": b"/tmp", "memory": 1}, TypeError, "expected a path"),
        ({"directory": "/tmp", "memory": 0}, ValueError, "memory=0: expected a whole number of at least 1"),
        ({"directory": "/tmp", "memory": 1e9}, ValueError, r"memory=1000000000.0: expected a whole number"),
        ({"directory": "/tmp", "memory": 1, "pin_memory": 1}, TypeError, "pin_memory=1: expected True or False"),
    ],
)
def test_an_invalid_policy_raises(arguments, kind, message):
    with pytest.raises(kind, match=message) as error:
        cs.DiskOffloadPolicy(**arguments)
    assert isinstance(error.value, cs.errors.ShardConfigError)


@pytest.mark.matrix
def test_fake_tensors_write_no_files(tmp_path):
    with testing.fake(2, 0), FakeTensorMode(allow_non_fake_inputs=True):
        model = decoder(cs.DiskOffloadPolicy(tmp_path, LEAST))
        optimizer = torch.optim.AdamW(model.parameters())
        assert type(cs.optim.offload_optimizer(optimizer)) is torch.optim.AdamW
        model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
        optimizer.step()
    assert os.listdir(tmp_path) == []


@pytest.mark.matrix
def test_a_compiled_optimizer_step_gives_the_same_result(tmp_path):
    sides = []
    for policy in (None, cs.DiskOffloadPolicy(tmp_path, LEAST)):
        model = decoder(shard=False)
        optimizer = torch.optim.AdamW(model.parameters())
        step = optimizer.step
        if policy is not None:
            cs.optim.offload_optimizer(optimizer, policy)
            step = torch.compile(optimizer.step, backend="eager")
        for number in range(3):
            next_token_loss(model, *token_batch(0, number)).backward()
            step()
            optimizer.zero_grad()
        sides.append((model, optimizer))
    assert_same(*sides)


def test_saved_and_copied_state_dicts_contain_only_the_state(tmp_path):
    model = decoder(shard=False)
    optimizer = cs.optim.offload_optimizer(torch.optim.AdamW(model.parameters()), cs.DiskOffloadPolicy(tmp_path, LEAST))
    train(model, optimizer, range(2))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    assert (tmp_path / "state.pt").stat().st_size < 2 * sum(v.nbytes for v in tensors_of(optimizer))
    kept = copy.deepcopy(optimizer.state_dict())
    before = [value.clone() for value in tensors_of(optimizer)]
    train(model, optimizer, [2])
    copied = [v for s in kept["state"].values() for v in s.values() if v.dim()]
    assert all(map(torch.equal, copied, before))
    other = torch.optim.AdamW(decoder(shard=False).parameters())
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert all(map(torch.equal, tensors_of(other), before))
