"""Out-of-memory errors have a note that lists memory by category and ways to use less."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import composable_shard as cs
from _engines import fully_shard, mesh_of
from _models import Stack, shard_blocks, vectors
from _pool import simulated
from _stepping import engine_of, train_step, twins
from composable_shard._engine import out_of_memory
from composable_shard._engine.out_of_memory import is_out_of_memory
from composable_shard._memory.device import DeviceMemory

MEMORY = "allocate memory"  # part of the message of torch's CPU allocator


def petabyte():
    torch.empty(1 << 50, dtype=torch.uint8)


class Greedy(nn.Module):
    """Allocates a petabyte in forward or in backward once `wants` is set."""

    wants = ""

    def forward(self, x):
        if self.wants == "forward":
            petabyte()
        return _Greedy.apply(x) if self.wants == "backward" else x.clone()


class _Greedy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        petabyte()


def greedy(**options):
    """A sharded model that has trained one step, its optimizer, the `Greedy` module, and the inputs."""
    torch.manual_seed(3)
    model = Stack(2, dim=256, hidden=512)
    told = Greedy()
    model.blocks[1].norm = nn.Sequential(model.blocks[1].norm, told)
    shard_blocks(model, fully_shard, mesh=mesh_of(2), **options)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(3):
        train_step(model, step)
        optimizer.step()
    return model, optimizer, told


def notes_of(call):
    with pytest.raises(RuntimeError, match=MEMORY) as caught:
        call()
    return getattr(caught.value, "__notes__", [])


@simulated(world=2)
def test_the_error_of_a_forward_lists_memory_by_category(rank, world):
    model, _, told = greedy()
    told.wants = "forward"
    (note,) = notes_of(lambda: train_step(model))
    assert_expected_inline(
        note.replace(f"rank {rank}", "rank R"),
        """\
memory of a sharded model on rank R, cpu:
  parameters (sharded): 1.01 MiB
  gradients: 1.01 MiB
  optimizer state: 2.02 MiB
  pool (gathered weights and communication): 2.02 MiB, 1.01 MiB of it in use now, peak use 2.02 MiB
  activations and everything else: unknown, the allocator of cpu has no statistics
ways to use less memory, with the most that each can save:
  1.01 MiB: a pool budget of at least PoolPolicy(budget=1063936)
  unknown: activation checkpointing (torch.utils.checkpoint) of each block
  unknown: smaller microbatches, with gradient accumulation""",
    )
    told.wants = ""
    train_step(model)


@simulated(world=2)
def test_the_listed_bytes_equal_those_of_the_tensors(rank, world):
    model, optimizer, told = greedy()
    told.wants = "forward"
    (note,) = notes_of(lambda: train_step(model))
    shards = [p.to_local() for p in optimizer.param_groups[0]["params"]]
    nbytes = sum(shard.nbytes for shard in shards)
    state = sum(each["exp_avg"].to_local().nbytes * 2 + each["step"].nbytes for each in optimizer.state.values())
    assert f"parameters (sharded): {nbytes / 2**20:.2f} MiB" in note
    assert f"gradients: {nbytes / 2**20:.2f} MiB" in note
    assert f"optimizer state: {state / 2**20:.2f} MiB" in note
    assert f"peak use {cs.stats(model)['pool/peak_bytes'] / 2**20:.2f} MiB" in note


@simulated(world=2)
def test_the_error_of_a_backward_has_the_note_only_if_the_step_is_wrapped(rank, world):
    model, optimizer, told = greedy()
    told.wants = "backward"
    assert notes_of(lambda: train_step(model)) == []

    @cs.explain_out_of_memory(model, optimizer)
    def step():
        train_step(model)

    (note,) = notes_of(step)
    assert note.startswith(f"memory of a sharded model on rank {rank}, cpu:")


@simulated(world=2)
def test_an_error_is_explained_once(rank, world):
    model, _, told = greedy()
    told.wants = "forward"
    with pytest.raises(RuntimeError, match=MEMORY) as caught, cs.explain_out_of_memory(model):
        train_step(model)
    assert len(caught.value.__notes__) == 1


@simulated(world=2)
def test_a_gather_that_runs_out_of_memory_in_backward_has_the_note(rank, world):
    model, _ = twins(reshard_after_forward=True)
    train_step(model)
    loss = model(*vectors(0, 1)).square().mean()
    engine_of(model).pool.start_over()  # so that backward must allocate
    assert_backward_explains(loss)


def assert_backward_explains(loss):
    allocate = DeviceMemory.allocate
    DeviceMemory.allocate = lambda self, nbytes: petabyte()
    try:
        (note,) = notes_of(loss.backward)
    finally:
        DeviceMemory.allocate = allocate
    assert "pool (gathered weights and communication)" in note


@simulated(world=2)
def test_an_optimizer_that_runs_out_of_memory_has_the_note_if_the_step_is_wrapped(rank, world):
    model, _, _ = greedy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: petabyte())

    def step():
        with cs.explain_out_of_memory(model):
            optimizer.step()

    assert len(notes_of(step)) == 1


@simulated(world=2)
def test_other_errors_and_models_that_have_not_run_have_no_note(rank, world):
    model, _, _ = greedy()
    with pytest.raises(KeyError) as caught, cs.explain_out_of_memory(model):
        raise KeyError("memory")
    assert not hasattr(caught.value, "__notes__")
    unused = cs.fully_shard(nn.Linear(2, 2), mesh=mesh_of(2))
    with pytest.raises(RuntimeError, match=MEMORY) as caught, cs.explain_out_of_memory(unused):
        petabyte()
    assert not hasattr(caught.value, "__notes__")


@simulated(world=2)
def test_a_model_that_is_not_sharded_is_an_error(rank, world):
    with (
        pytest.raises(cs.errors.ShardConfigValueError, match="Stack contains no sharded module"),
        cs.explain_out_of_memory(Stack()),
    ):
        pass


def advice_of(note):
    return note.partition("ways to use less memory, with the most that each can save:\n")[2].splitlines()


@simulated(world=2)
def test_advice_covers_weights_kept_after_forward_and_unreduced_gradients(rank, world):
    model, _, told = greedy(reshard_after_forward=False)
    model.set_requires_gradient_sync(False)
    train_step(model)
    told.wants = "forward"
    (note,) = notes_of(lambda: train_step(model))
    assert_expected_inline(
        "\n".join(advice_of(note)),
        """\
  2.02 MiB: set_requires_gradient_sync(True): reduce gradients in each microbatch
  1.01 MiB: reshard_after_forward=True (ZeRO-3 instead of ZeRO-2) for blocks.0 and 1 more
  1.01 MiB: a pool budget of at least PoolPolicy(budget=1063936)
  unknown: activation checkpointing (torch.utils.checkpoint) of each block
  unknown: smaller microbatches, with gradient accumulation""",
    )
    model.set_pool_policy(cs.PoolPolicy(budget=1 << 30))
    told.wants = ""
    train_step(model)
    told.wants = "forward"
    (note,) = notes_of(lambda: train_step(model))
    assert "PoolPolicy" not in note


@simulated(world=2)
def test_advice_for_a_model_with_one_group_is_to_shard_each_block(rank, world):
    model = cs.fully_shard(nn.Sequential(nn.Linear(64, 64), told := Greedy()), mesh=mesh_of(2))
    model(torch.ones(2, 64)).sum().backward()
    told.wants = "forward"
    (note,) = notes_of(lambda: model(torch.ones(2, 64)))
    assert "fully_shard on each block as well" in note


def test_other_memory_of_an_accelerator_counts_as_activations_and_comes_first_in_the_advice(monkeypatch):
    gib = 1 << 30
    counted = out_of_memory._Allocator(allocated=30 * gib, peak=40 * gib, reserved=32 * gib)
    monkeypatch.setattr(out_of_memory, "_allocator_of", lambda device: counted)
    notes = []

    @simulated(world=2)
    def test(rank, world):
        model, _, told = greedy()
        told.wants = "forward"
        notes.extend(notes_of(lambda: train_step(model)))

    test()
    figures, advice = notes[0].splitlines(), advice_of(notes[0])
    assert any("activations and everything else: 307" in line and "now, 409" in line for line in figures)
    assert ["torch.utils.checkpoint" in advice[0], "smaller microbatches" in advice[1]] == [True, True]
    assert "2048.00 MiB: PYTORCH_ALLOC_CONF" in advice[2]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_errors_are_recognized_by_type_or_message(error, expected):
    assert is_out_of_memory(error) is expected


def test_a_failure_to_count_memory_does_not_hide_the_error(monkeypatch):
    monkeypatch.setattr(out_of_memory, "_Held", None)

    @simulated(world=2)
    def test(rank, world):
        model, _, told = greedy()
        told.wants = "forward"
        (note,) = notes_of(lambda: train_step(model))
        assert "could not be counted: TypeError: 'NoneType' object is not callable" in note

    test()
