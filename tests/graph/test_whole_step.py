"""A whole training step in one compiled function, from forward to clipping; and compiled autograd with eager steps."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline
from torch.distributed.tensor import DTensor

import composable_shard as cs
from _blocks import next_token_loss, token_batch
from _compiling import LIMIT_S, graphs_of, same_gradients, text_of, under_inductor
from _decoders import Training
from _engines import fully_shard
from _models import Stack, shard_blocks, vectors
from _pool import POOL, distributed
from _stepping import assert_at_rest, assert_same_gradients, loss_of, twins
from composable_shard._torch.core import GRAPHS_GIVE_NONE
from composable_shard.report import watch_graphs

CLIPS = {"torch": torch.nn.utils.clip_grad_norm_, "ours": cs.clip_grad_norm_}


def step(model: nn.Module, clip: str, *batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward, loss, backward and clipping in a form that `torch.compile` supports: the loss is returned detached."""
    loss = model(*batch).square().mean()
    loss.backward()
    norm = CLIPS[clip](model.parameters(), 0.1)
    return loss.detach(), norm


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def close(model: nn.Module, plain: nn.Module) -> None:
    for name, param in plain.named_parameters():
        torch.testing.assert_close(whole(model.get_parameter(name).grad), param.grad, msg=lambda m, n=name: f"{n}: {m}")


def train(rank: int, world: int, clip: str, uneven: bool = False, **options: Any) -> str:
    """Three steps with accumulation in the second, evaluations between, an eager step, and one that is refused."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    plain = Stack(2, dim=6, hidden=10) if uneven else Stack(2, dim=8, hidden=16)
    eager, model = copy.deepcopy(plain), copy.deepcopy(plain)
    for each in (eager, model):
        shard_blocks(each, fully_shard, **options)
    run = torch.compile(step, fullgraph=True, backend=cs._compile.compiled.aot_eager())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, eager, model)]
    with watch_graphs() as found:
        for number in range(4):
            batch = vectors(0, number)
            results = [step(plain, clip, *batch), step(eager, clip, *batch)]
            with torch._dynamo.config.patch(trace_autograd_ops=True):
                results.append((step if number == 3 else run)(model, clip, *batch))
            assert len({type(norm) for _, norm in results[1:]}) == 1
            losses, norms = zip(*results, strict=True)
            for values in (losses, list(map(whole, norms))):
                assert torch.equal(values[1], values[2]), f"{values} in step {number}"
                torch.testing.assert_close(values[2], values[0])
            assert not losses[2].requires_grad
            same_gradients(eager, model, f"in step {number}")
            close(model, plain)
            if number != 1:  # step 1 keeps its gradients, so that step 2 adds to them
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            with torch.no_grad():
                evaluated = [each(*batch) for each in (plain, eager, model)]
            assert torch.equal(evaluated[1], evaluated[2])
            torch.testing.assert_close(evaluated[2], evaluated[0])
            assert_at_rest(model)
        assert len(found) == 2
        model.set_requires_gradient_sync(False)
        with (
            pytest.raises(
                cs.errors.ShardConfigStateError, match=r"set_requires_gradient_sync\(False\) cannot be part of"
            ),
            torch._dynamo.config.patch(trace_autograd_ops=True),
        ):
            run(model, clip, *vectors(0, 0))
    return text_of(found[:2])


def refused(rank, world, flag=True):
    """torch refuses the step, and an eager step of the same model is correct afterwards."""
    torch._dynamo.reset()
    model, plain = twins()
    refusals = (torch._dynamo.exc.TorchDynamoException, AssertionError)  # torch 2.11 raises AssertionError
    with pytest.raises(refusals), torch._dynamo.config.patch(trace_autograd_ops=flag):
        torch.compile(step, fullgraph=True, backend="aot_eager")(model, "ours", *vectors(0, 0))
    for each in (model, plain):
        loss_of(each).backward()
    assert_same_gradients(model, plain)


@pytest.mark.parametrize(
    ("clip", "world", "options"),
    [
        ("ours", 2, {}),
        pytest.param("torch", 2, {"uneven": True}, marks=pytest.mark.matrix),
        pytest.param("torch", 4, {}, marks=pytest.mark.matrix),
        pytest.param("ours", 2, {"reshard_after_forward": False}, marks=pytest.mark.matrix),
    ],
)
def test_a_whole_step_is_one_graph_that_gathers_again_and_reduces(clip, world, options):
    """One graph is for `.grad` None, and one adds to `.grad`; A is the all-reduce of the norm."""
    if not GRAPHS_GIVE_NONE:  # torch 2.11 traces no backward to parameters that are DTensors
        POOL.run("test_whole_step:refused", world, limit_s=LIMIT_S)
        return
    text = graphs_of(train, world, clip=clip, **options)
    assert text.count("inference") == text.count("\n") == 2
    if not options and world == 2:
        assert_expected_inline(
            text,
            """\
inference GwGmwGmmwGmmmmmmmmmwGRmmmmwRmRwwwAw
inference GwGmwGmmwGmmmmmmmmmwGRmmmmwRmRwwwAw
""",
        )


@distributed(world=2, limit_s=LIMIT_S)
def test_a_whole_step_without_torchs_flag_raises_torchs_error(rank, world):
    refused(rank, world, flag=False)


def token_step(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    loss = next_token_loss(model, tokens)
    loss.backward()
    return loss.detach()


def in_order(rank: int, world: int) -> str:
    """Steps and an evaluation of a decoder under Inductor, with the same graphs as under aot_eager."""
    warnings.simplefilter("ignore")  # torch itself uses deprecated functions
    texts = []
    for backend in (cs._compile.compiled.aot_eager(), "composable_shard"):
        torch._dynamo.reset()
        training = Training(rank, world)
        model, plain, tokens = training.model, training.plain, token_batch(rank, 1000)
        run, evaluate = (torch.compile(each, fullgraph=True, backend=backend) for each in (token_step, next_token_loss))
        with under_inductor(0.0), watch_graphs() as found, torch._dynamo.config.patch(trace_autograd_ops=True):
            for number in range(3):
                run(model, *token_batch(rank, number))
                training.backward_of_plain()
                training.check_gradients()
                training.update()
            with torch.no_grad():
                torch.testing.assert_close(evaluate(model, *tokens), next_token_loss(plain, *tokens))
        texts.append(text_of(found))
        assert cs.stats(model)["pool/live_bytes"] == 0
        assert_at_rest(model)
    assert texts[0] == texts[1]
    return texts[1]


@pytest.mark.matrix
def test_inductor_overlaps_communication_in_a_whole_step_and_in_an_evaluation():
    if not GRAPHS_GIVE_NONE:  # torch 2.11 traces no backward to parameters that are DTensors
        return
    assert_expected_inline(
        graphs_of(in_order),
        """\
inference GwGwGmmmmmmmwGmmmmmmmwGmmmmmmmmmmmmmmmmmmmmmmmmwGRmmmmmmmmmmmmmmwwGRmmmmmmmmmmmmmmwRRwww
inference GwGwGmmmmmmmwGmmmmmmmwmmmmmmmm
""",
    )


class UsedByTheFirst(nn.Module):
    """A layer, and a scale that is used on rank 0 only."""

    def __init__(self, uses: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.scale, self.uses = nn.Linear(4, 4), nn.Parameter(torch.ones(4)), uses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale if self.uses else self.layer(x)


def backward_too(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.matrix
@distributed(world=2, limit_s=LIMIT_S)
def test_a_parameter_used_only_by_other_ranks_is_an_error_in_a_whole_step(rank, world):
    if not GRAPHS_GIVE_NONE:  # torch 2.11 traces no backward to parameters that are DTensors
        refused(rank, world)
        return
    torch._dynamo.reset()
    x, plain = torch.ones(2, 4), [UsedByTheFirst(uses) for uses in (True, False)]
    model = fully_shard(UsedByTheFirst(rank == 0))
    run = torch.compile(backward_too, fullgraph=True, backend=cs._compile.compiled.aot_eager())
    used = (
        contextlib.nullcontext()
        if rank == 0
        else pytest.raises(cs.errors.ShardConfigStateError, match="only other ranks")
    )
    with torch._dynamo.config.patch(trace_autograd_ops=True), used:
        run(model, x)
    model.zero_grad()
    for each in (*plain, model):
        backward_too(each, x)
    for name, param in model.named_parameters():
        grads = [each.get_parameter(name).grad for each in plain]
        torch.testing.assert_close(whole(param.grad), sum(grad for grad in grads if grad is not None) / 2)
    assert_at_rest(model)


# ---- compiled autograd


def compiled_autograd() -> Any:
    return torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager"))


@pytest.mark.matrix
@distributed(world=2, limit_s=LIMIT_S)
def test_compiled_autograd_fails_with_an_eager_forward_and_works_with_a_compiled_one(rank, world):
    torch._dynamo.reset()
    warnings.simplefilter("ignore")  # torch reads `.grad` of tensors that are not leaves
    model, plain = twins()
    loss_of(plain).backward()
    loss = loss_of(model)
    with (
        pytest.raises(cs.errors.ShardConfigStateError, match=r"group blocks\.\d: compiled autograd cannot trace"),
        compiled_autograd(),
    ):
        loss.backward()
    loss.backward()  # the error has changed nothing
    assert_same_gradients(model, plain)
    assert_at_rest(model)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        model.zero_grad()
        with compiled_autograd():
            loss_of(run).backward()
        close(model, plain)


@pytest.mark.matrix
@distributed(world=2, limit_s=LIMIT_S)
def test_compiled_autograd_works_through_frozen_sharded_modules(rank, world):
    torch._dynamo.reset()
    warnings.simplefilter("ignore")
    model, plain = (each.requires_grad_(False) for each in twins())
    inputs = [vectors(0, 0)[0].requires_grad_() for _ in range(2)]
    plain(inputs[0]).square().mean().backward()
    loss = model(inputs[1]).square().mean()
    with compiled_autograd():
        loss.backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    assert_at_rest(model)
