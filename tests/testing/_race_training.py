"""Shard and train a small decoder under `testing.races`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import composable_shard as cs
from _blocks import SwiGLU, Transformer, next_token_loss, token_batch
from composable_shard import MixedPrecisionPolicy, testing

STEPS = 2  # the first leases slots one by one, and the second creates the arena; `perform` then runs a forward
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass
class Training:
    """A model with its optimizer. `number` is the number of the step."""

    checked: testing.Checked
    model: Any
    optimizer: torch.optim.Optimizer
    number: int = 0

    def forward(self) -> Tensor:
        return next_token_loss(self.model, *token_batch(0, self.number))

    def backward(self) -> None:
        self.forward().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def plain_step(training: Training) -> None:
    training.backward()
    training.update()


def decoder(layers: int = 2, dim: int = 16, **sizes: Any) -> nn.Module:
    """A decoder with blocks of different sizes, so that slots of the arena overlap partially."""
    model = Transformer(layers=layers, dim=dim, dropout=0.1, **sizes)
    for index, block in enumerate(model.blocks):
        block.feed_forward = SwiGLU(dim, (24, 56, 8)[index % 3])
    return model


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, foreach=True)


@dataclass(frozen=True)
class Scenario:
    """How a decoder is sharded and trained.

    Attributes:
        options: arguments of `fully_shard`.
        transport: transport for gathers and reductions.
        mesh: names and sizes of the axes of the mesh.
        make: creates the decoder.
        parallelize: is called with the decoder and the mesh before sharding.
        prepare: is called with the sharded model and the checker before the first step.
        step: one training step.
        end: is called after the last step.
        around: context manager in which everything runs.
        optimizer: creates the optimizer.
        axis: axis of the mesh over which `fully_shard` shards; the whole mesh if empty.
        steps: number of steps.
    """

    options: dict[str, Any] = field(default_factory=dict)
    transport: str = "direct"
    mesh: dict[str, int] = field(default_factory=lambda: {"shard": 4})
    make: Callable[[], nn.Module] = decoder
    parallelize: Callable[[nn.Module, Any], object] | None = None
    prepare: Callable[[Any, testing.Checked], object] | None = None
    step: Callable[[Training], object] = plain_step
    end: Callable[[Training], object] | None = None
    around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = sgd
    axis: str = ""
    steps: int = STEPS


def build(scenario: Scenario, checked: testing.Checked) -> Any:
    torch.manual_seed(0)
    model: Any = scenario.make()
    if scenario.parallelize is not None:
        scenario.parallelize(model, checked.mesh)
    mesh = checked.mesh[scenario.axis] if scenario.axis else checked.mesh
    for module in (*model.blocks, model):
        cs.fully_shard(module, mesh=mesh, **scenario.options)
    if scenario.prepare is not None:
        scenario.prepare(model, checked)
    return model


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: the operators are small, and pytest's processes share the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def perform(scenario: Scenario, until_race: bool = False) -> testing.Checked:
    """Train for the steps of a scenario, or until a race is found. Returns the checker."""
    world = functools.reduce(int.__mul__, scenario.mesh.values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPOSABLE_SHARD_TRANSPORT", scenario.transport)
        with one_thread(), scenario.around(), testing.races(world, mesh=scenario.mesh, check=False) as checked:
            model = build(scenario, checked)
            trained = [p for p in model.parameters() if p.requires_grad]
            training = Training(checked, model, scenario.optimizer(trained))
            del model, trained  # a step may delete them
            for training.number in range(scenario.steps):
                scenario.step(training)
                if until_race and checked.races:
                    return checked
            if scenario.end is not None:
                scenario.end(training)
            if hasattr(training, "model"):
                training.forward().item()
    return checked
