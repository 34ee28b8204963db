"""A small decoder for the rows about torchao, with functions to convert, train, save and load it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from _rows import OURS, Run

VOCABULARY, WIDTH, HEADS, LENGTH = 128, 64, 4, 10


class Attention(nn.Module):
    """Causal attention with grouped heads and rotary position embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.size = WIDTH // HEADS
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.v = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        angles = torch.outer(torch.arange(LENGTH), 100.0 ** -(torch.arange(0, self.size, 2) / self.size))
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for each in (self.q, self.k, self.v))
        out = functional.scaled_dot_product_attention(
            self.turned(q), self.turned(k), v, is_causal=True, enable_gqa=True
        )
        return self.o(out.transpose(1, 2).flatten(-2))

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = self.turns.to(x.dtype)
        one, other = x.chunk(2, dim=-1)
        return torch.cat([one * cos - other * sin, one * sin + other * cos], dim=-1)


class Block(nn.Module):
    """Attention, then a gated feed-forward layer of width `wide`."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.gate, self.up = nn.Linear(WIDTH, wide, bias=False), nn.Linear(WIDTH, wide, bias=False)
        self.down = nn.Linear(wide, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        y = self.between(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, wide: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(wide) for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def inner(module: nn.Module, name: str) -> bool:
    """Return whether to convert a layer: all linear layers except the head, as torchao recommends."""
    return isinstance(module, nn.Linear) and name != "head"


def build(
    convert: Callable[[nn.Module], object], wide: int = 128, seed: int = 0, dtype: Any = None, **given: Any
) -> nn.Module:
    torch.manual_seed(seed)
    model = Llama(wide).to(dtype)
    convert(model)
    for block in model.blocks:
        fully_shard(block, **given)
    fully_shard(model, **given)
    return model


def batch(rank: int, step: int, count: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random tokens and labels: `count` sequences."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(VOCABULARY, (count, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


Batches = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]


def train(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    after: Callable[[nn.Module], object],
    batches: Batches = batch,
) -> list[float]:
    """Train a model, and return the losses.

    Args:
        after: a function that is called with the model after each step.
        batches: returns the tokens and labels of a rank and a step.
    """
    losses = []
    for step in steps:
        torch.manual_seed(1000 + step)  # for stochastic rounding
        tokens, labels = batches(run.rank, step)
        loss = functional.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after(model)
        losses.append(loss.item())
    return losses


def evaluated(run: Run, model: nn.Module, batches: Batches = batch) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        output = model(batches(run.rank, 50)[0])
    model.train()
    return output


def nothing(model: nn.Module) -> None:
    """Do nothing: no conversion, or no call after a step."""


ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def life(
    run: Run,
    convert: Callable[[nn.Module], object] = nothing,
    optimize: Callable[..., torch.optim.Optimizer] = ADAMW,
    after: Callable[[nn.Module], object] = nothing,
    saves: bool = True,
    gathers: bool = True,
    batches: Batches = batch,
    **given: Any,
) -> nn.Module:
    """Train, evaluate and train again; then save, load into another model, and train both.

    Args:
        convert: a function that converts the model before it is sharded.
        optimize: a function that returns an optimizer for parameters.
        after: a function that is called with the model after each step.
        saves: whether to save and load a checkpoint.
        gathers: whether to record full weights; otherwise each rank records its shards.
        batches: returns the tokens and labels of a rank and a step.
        given: arguments of `build`.
    """

    def note(one: nn.Module, name: str) -> None:
        if gathers:
            run.weights(one, name)
        else:
            run.note(name, {name: value.to_local() for name, value in one.named_parameters()})

    dist.init_process_group("gloo")
    model = build(convert, **given)
    run.sharded(model)
    optimizer = optimize([each for each in model.parameters() if each.requires_grad])
    run.note("losses", train(run, model, optimizer, range(3), after, batches))
    run.note("evaluated", evaluated(run, model, batches))
    run.note("loss after evaluation", train(run, model, optimizer, range(3, 4), after, batches))
    note(model, "weights")
    if saves:
        states, kept = get_state_dict(model, optimizer)
        dcp.save({"model": states, "optimizer": kept}, checkpoint_id="saved")
        other = build(convert, seed=1, **given)
        again = optimize([each for each in other.parameters() if each.requires_grad])
        states, kept = get_state_dict(other, again)
        read = {"model": states, "optimizer": kept}
        dcp.load(read, checkpoint_id="saved")
        set_state_dict(other, again, model_state_dict=read["model"], optim_state_dict=read["optimizer"])
        note(other, "loaded")
        run.note(
            "losses of both",
            [
                train(run, model, optimizer, range(4, 6), after, batches),
                train(run, other, again, range(4, 6), after, batches),
            ],
        )
        note(other, "loaded and trained")
    return model


def float8(model: nn.Module, **given: Any) -> None:
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True, **given), module_filter_fn=inner)


GATHERED = partial(float8, enable_fsdp_float8_all_gather=True)
HALF = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


# ---- compiled

AOT, INDUCTOR = "aot_eager", "inductor"


@dataclass(frozen=True)
class Recipe:
    """A way to convert a model.

    Attributes:
        convert: converts a model before it is sharded.
        after: is called with the model after each step.
        unsharded: converts the unsharded model that computes the same values; by default `convert`.
    """

    convert: Callable[[nn.Module], object]
    after: Callable[[nn.Module], object] = nothing
    unsharded: Callable[[nn.Module], object] | None = None

    def with_checkpoints(self) -> Recipe:
        """Return this recipe with activation checkpoints around the blocks."""
        return replace(self, convert=partial(recomputed, convert=self.convert))


def recomputed(model: nn.Module, convert: Callable[[nn.Module], object]) -> None:
    """Convert a model, and wrap its blocks in activation checkpoints."""
    convert(model)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)


def compile_blocks(model: nn.Module, backend: str) -> nn.Module:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return model


def compile_whole(model: nn.Module, backend: str) -> Any:
    return torch.compile(model, backend=backend, fullgraph=True)


def check_graphs(most: int) -> None:
    """Check how many graphs were compiled for training; the first scale of a weight adds an input to the graph."""
    made = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert made <= most, f"{made} graphs were compiled"


def compiled(run: Run, recipe: Recipe, whole: bool, batches: Batches = batch, **given: Any) -> None:
    """Train and evaluate with `aot_eager`. With FSDP2, only the blocks are compiled: its hooks break a whole graph."""
    dist.init_process_group("gloo")
    model = build(recipe.convert, **given)
    run.sharded(model)
    called = (compile_whole if whole and run.side == OURS else compile_blocks)(model, AOT)
    optimizer = ADAMW(list(model.parameters()))
    run.note("losses", train(run, called, optimizer, range(4), recipe.after, batches))
    if whole and run.side == OURS:
        check_graphs(2)
    run.note("evaluated", evaluated(run, called, batches))
    run.note("losses after evaluation", train(run, called, optimizer, range(4, 6), recipe.after, batches))
    run.weights(model)
