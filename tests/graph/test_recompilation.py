"""Recompilations: never more of them than for the unsharded model, and the failed guard is named.

On the fabric, one process compiles for all ranks. Where results matter, the tests use real ranks.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

import composable_shard as cs
from _blocks import Attention, rotary
from _compiling import LIMIT_S
from _models import vectors
from _pool import distributed, more
from _stepping import assert_same_gradients, twins
from composable_shard import testing
from composable_shard.report import FailedGuard, watch_graphs

with warnings.catch_warnings():  # raised by the module's own imports
    warnings.simplefilter("ignore")
    import torch._dynamo

WORLD, DIM = 4, 8


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    torch._dynamo.reset()
    with testing.fabric(WORLD, latency_s=1e-5, bandwidth_Bps=1e9, clock="virtual"):
        yield
    torch._dynamo.reset()


def sharded(model: nn.Module, *parts: nn.Module) -> nn.Module:
    for each in (*parts, model):
        cs.fully_shard(each, mesh=init_device_mesh("cpu", (WORLD,)))
    return model


# ---- as often as the unsharded model


def freeze(model: nn.Module, part: str) -> None:
    """Freeze the parameters with `part` in their name, and no others."""
    for name, param in model.named_parameters():
        param.requires_grad_(not part or part not in name)


class Attending(nn.Module):
    """The attention of a decoder's block: norm, grouped heads, rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.attention = Attention(DIM, heads=2, kv_heads=1, dropout=0.0)
        cos, sin = rotary(16, DIM // 2)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        return x + self.attention(self.norm(x), self.cos[:length], self.sin[:length])


class Calls:
    """Calls of a compiled model, with the number of graphs that each call has made."""

    def __init__(self, model: nn.Module, dynamic: bool | None) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        self.model = model
        self.run = cs.compile(model, backend="aot_eager", dynamic=dynamic)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.graphs: dict[str, int] = {}

    def do(self, name: str, call: Callable[..., None], *args: object) -> None:
        graphs = torch._dynamo.utils.counters["stats"]
        before = graphs["unique_graphs"]
        call(*args)
        self.graphs[name] = graphs["unique_graphs"] - before

    def step(self, batch: int, length: int, frozen: str = "", lr: float = 0.1) -> None:
        self.model.train()
        freeze(self.model, frozen)
        self.optimizer.param_groups[0]["lr"] = lr
        self.run(torch.ones(batch, length, DIM)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self, batch: int, length: int, mode: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self.model.eval()
        with mode():
            self.run(torch.ones(batch, length, DIM))


SIZES = [(2, 7), (3, 9), (5, 6), (4, 11)]  # shards also have a dim of size 2


def call_all(calls: Calls, modes: dict[str, Callable[[], contextlib.AbstractContextManager[None]]]) -> dict[str, int]:
    """Make every type of call twice, with different sizes; returns the numbers of graphs."""
    for time in range(2):
        calls.do(f"step {time}", calls.step, *SIZES[time])
    for time in range(2):
        size, other = SIZES[2 - time], SIZES[3 - time]
        calls.do(f"frozen {time}", calls.step, *size, "attention.q")
        calls.do(f"no longer frozen, another learning rate {time}", calls.step, *other, "", 0.1 / (2 + time))
        for name, mode in modes.items():
            calls.do(f"{name} {time}", calls.evaluate, *size, mode)
        calls.do(f"training again {time}", calls.step, *other)
    return calls.graphs


MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("dynamic", "modes"),
    [(True, []), more(True, ["inference_mode", "no_grad"]), more(None, ["no_grad", "inference_mode"])],
)
def test_a_sharded_model_is_compiled_no_more_often_than_the_unsharded_one(dynamic, modes):
    modes = {name: MODES[name] for name in modes}
    plain = call_all(Calls(Attending(), dynamic), modes)
    with one_process():
        model = Attending()
        found = call_all(Calls(sharded(model, model.attention), dynamic), modes)
    assert found == plain
    assert {found[f"{name} 0"] for name in ("step", "frozen", *modes)} == {1}, "these are different graphs"
    late = {name: count for name, count in found.items() if name.endswith("1") or "again" in name or "rate" in name}
    assert dynamic is None or not any(late.values()), late


# ---- the guard that failed


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8, bias=False)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * self.scale


def failures(shards: bool) -> dict[str, list[FailedGuard]]:
    """The guards that fail in calls of another type."""
    model = Scaled()
    if shards:
        sharded(model, model.lin)
    run = cs.compile(model, backend="aot_eager", dynamic=False)
    found: dict[str, list[FailedGuard]] = {}

    def call(what: str, rows: int) -> None:
        with watch_graphs() as seen:
            run(torch.ones(rows, 8)).sum().backward()
        assert bool(seen) == bool(not found or seen.failed_guards), "each graph but the first has a failed guard"
        found[what] = list(seen.failed_guards)

    call("first", 2)
    call("the same", 2)
    call("another batch", 3)
    model.scale = 2.0
    call("another constant", 3)
    return found


def test_watch_graphs_names_the_guard_that_failed():
    torch._dynamo.reset()
    plain = failures(False)
    with one_process():
        found = failures(True)
    assert found["first"] == found["the same"] == []
    (of_batch,) = found["another batch"]
    (of_constant, _) = found["another constant"]  # for each of the two code objects, the newest one first
    assert of_batch.guard == "0/0: tensor 'args[0]' size mismatch at index 0. expected 2, actual 3"
    assert "self.scale == 1.0 " in of_constant.guard
    assert "compiled again because a guard failed: 0/1: self.scale == 1.0" in str(of_constant)
    for what, guards in found.items():
        of_plain = [each.guard.replace("tensor 'x'", "tensor 'args[0]'") for each in plain[what]]
        assert [each.guard for each in guards] == of_plain


# ---- torch.compiler.set_stance


def step_under(stance: str, rows: int, number: int):
    def loss_of(each):
        (x,) = vectors(0, number)
        with torch.compiler.set_stance(stance):
            return each(x[:1].repeat(rows, 1)).square().mean()

    return loss_of


@pytest.mark.matrix
@distributed(world=2, limit_s=LIMIT_S)
def test_a_stance_may_change_in_the_middle_of_training(rank, world):
    torch._dynamo.reset()
    model, plain = twins()
    run = cs.compile(model, backend="aot_eager", dynamic=False)
    both = [(model, run), (plain, plain)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each, _ in both]
    stances = [
        ("default", 3, 2), ("force_eager", 3, 0), ("default", 3, 0), ("fail_on_recompile", 3, 0),
        ("eager_on_recompile", 3, 0), ("eager_on_recompile", 5, 0), ("default", 5, 2), ("force_eager", 7, 0),
        ("fail_on_recompile", 5, 0), ("default", 3, 0),
    ]  # fmt: skip
    for number, (stance, rows, compiled) in enumerate(stances):
        with watch_graphs() as seen:
            losses = [step_under(stance, rows, number)(call) for _, call in both]
            for loss in losses:
                loss.backward()
        assert torch.equal(*losses), (number, stance)
        assert_same_gradients(model, plain)
        assert len(seen) == compiled, (number, stance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if stance == "fail_on_recompile":  # a refused call leaves the model as it was
            with pytest.raises(RuntimeError, match="fail_on_recompile"):
                step_under(stance, 4, number)(run)
