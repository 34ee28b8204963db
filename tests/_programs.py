"""Random programs: a user's actions in random order, on a sharded decoder and on an unsharded one.

A program is determined by its seed and is the same on all ranks. Each rank has different data, and the unsharded
decoder gets the data of all ranks. Everything is in float64, so that errors are larger than rounding.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import composable_shard as cs
from _blocks import Transformer, TransformerBlock
from _engines import fully_shard, mesh_of

DIM, VOCABULARY, LENGTH = 8, 13, 6
CLOSE = {"rtol": 1e-7, "atol": 1e-9}
REENTRANT = {"none": None, "reentrant": True, "not reentrant": False}  # `use_reentrant`; None: no checkpoint


class PlantedError(Exception):
    """Raised in a forward that a program lets fail."""


def called(reentrant: bool | None, module: nn.Module, *args: Tensor) -> Tensor:
    """Call a module, in a checkpoint unless `reentrant` is None."""
    return module(*args) if reentrant is None else checkpoint(module, *args, use_reentrant=reentrant)


class Block(TransformerBlock):
    """A block with a gate. It stores the gate's mean for an auxiliary loss, and can fail in the middle of forward."""

    def __init__(self) -> None:
        super().__init__(DIM, heads=2, kv_heads=1, hidden=10, dropout=0.0)
        self.gate = nn.Linear(DIM, 1)
        self.auxiliary: Tensor | None = None
        self.inner: bool | None = None
        self.fails = False

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        if self.fails:
            raise PlantedError
        gate = self.gate(x).sigmoid()
        self.auxiliary = gate.mean()
        return x + gate * called(self.inner, self.feed_forward, self.feed_forward_norm(x))


class Decoder(Transformer):
    """A decoder that can skip a block, run one twice, and checkpoint blocks."""

    def __init__(self, layers: int, tied: bool) -> None:
        super().__init__(VOCABULARY, DIM, 0, heads=2, length=LENGTH, tied=tied)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.around: bool | None = None
        self.left_out = self.twice = -1

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            for _ in range(0 if number == self.left_out else 2 if number == self.twice else 1):
                x = called(self.around, block, x, self.cos, self.sin)
        return self.head(self.norm(x))

    def auxiliary(self) -> Tensor:
        """The sum of the auxiliary losses that the blocks stored in the last forward."""
        return torch.stack([block.auxiliary for block in self.blocks if block.auxiliary is not None]).sum()

    def set(self, **values: Any) -> None:
        """Change settings of the next forwards, and delete stored auxiliary losses."""
        for name, value in values.items():
            setattr(self, name, value)
        for block in self.blocks:
            block.auxiliary = None


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def tokens_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


# ---- backwards: arguments are the model, the tokens of two batches, and a factor for the losses


def _plain(model: Decoder, first: Tensor, second: Tensor, by: float) -> None:
    (loss_of(model, first) * by).backward()


def _with_auxiliary(model: Decoder, first: Tensor, second: Tensor, by: float) -> None:
    ((loss_of(model, first) + 0.1 * model.auxiliary()) * by).backward()


def _auxiliary_first(model: Decoder, first: Tensor, second: Tensor, by: float) -> None:
    loss, auxiliary = loss_of(model, first), model.auxiliary()
    if auxiliary.requires_grad:  # False if it was computed in a reentrant checkpoint
        (auxiliary * by).backward(retain_graph=True)
    (loss * by).backward()


def _through_two_forwards(model: Decoder, first: Tensor, second: Tensor, by: float) -> None:
    ((loss_of(model, first) + loss_of(model, second)) * by).backward()


def _one_after_another(model: Decoder, first: Tensor, second: Tensor, by: float) -> None:
    losses = [loss_of(model, tokens) * by for tokens in (first, second)]
    for loss in losses:
        loss.backward()


def _twice(model: Decoder, first: Tensor, second: Tensor, by: float) -> None:
    loss = loss_of(model, first) * by
    loss.backward(retain_graph=True)
    loss.backward()


BACKWARDS = (
    _plain,
    _plain,
    _plain,
    _with_auxiliary,
    _auxiliary_first,
    _through_two_forwards,
    _one_after_another,
    _twice,
)


class Program:
    """One program on one rank.

    Attributes:
        said: description of the actions so far, for messages.
        roots_blocks: whether parts of blocks belong to the root. If the root then reshards after forward, a checkpoint
            cannot recompute these parts for a separate loss before the root's output has a gradient. torch raises the
            same error with FSDP2.
    """

    def __init__(self, seed: int, rank: int, world: int) -> None:
        self.random, self.rank, self.world = random.Random(seed), rank, world
        self.step, self.said = 0, [f"seed {seed}, world {world}"]
        torch.manual_seed(seed)
        self.plain = Decoder(self.random.choice((2, 3, 4)), tied=self.random.random() < 0.25).double()
        self.model = copy.deepcopy(self.plain)
        if self.random.random() < 0.25:
            frozen = self.random.randrange(3)
            self._both(lambda model: [p.requires_grad_(n % 3 != frozen) for n, p in enumerate(model.parameters())])
        self._shard()
        self.make_optimizers()

    def _shard(self) -> None:
        options: dict[str, Any] = {"reshard_after_forward": self.random.choice((None, True, True, False))}
        if self.world == 4 and self.random.random() < 0.5:
            options["mesh"] = mesh_of(2, 2)
        elif self.world == 4 and self.random.random() < 0.5:
            options["reshard_after_forward"] = 2
        if self.random.random() < 0.2:
            options["offload_policy"] = cs.CPUOffloadPolicy()
        cut = self.random.choice(("blocks", "blocks", "within blocks", "pairs", "every other block"))
        self.said.append(f"shard {cut}, {options}")
        self.roots_blocks = cut in ("within blocks", "every other block")
        for number, block in enumerate(self.model.blocks):
            if cut == "within blocks":
                fully_shard(block.feed_forward, **options)
            if cut == "pairs" and number == 0:
                fully_shard([*self.model.blocks[:2]], **options)
            elif not (cut == "pairs" and number == 1) and not (cut == "every other block" and number % 2):
                fully_shard(block, **options)
        fully_shard(self.model, **options)
        if self.random.random() < 0.4:
            ahead = cs.PrefetchPolicy
            policy = self.random.choice((ahead.depth(0), ahead.depth(2), ahead.bytes(3000), ahead.auto()))
            self.said.append(str(policy))
            self.model.set_prefetch_policy(policy)

    def run(self, events: int) -> None:
        """Run `events` random actions, then train and evaluate.

        Raises:
            AssertionError: the sharded decoder differs from the unsharded one; notes list the actions.
        """
        often = (self.train,) * 8 + (self.evaluate,) * 3 + (self.change_forward,) * 3
        rarely = (
            self.fail, self.drop, self.load, self.edit, self.freeze, self.hook, self.reshard, self.unshard,
            self.list_modules, self.bound, self.make_optimizers,
        )  # fmt: skip
        try:
            for _ in range(events):
                self.random.choice(often + rarely)()
            self.model.set_pool_policy(cs.PoolPolicy())
            for last in (self.train, self.train, self.evaluate):
                last()
        except BaseException as error:
            error.add_note("\n".join(self.said))
            raise

    def _both(self, do: Callable[[Decoder], object]) -> None:
        for model in (self.plain, self.model):
            do(model)

    def _assert_same(self, of: Callable[[Tensor], Tensor | None]) -> None:
        for (name, param), mine in zip(self.plain.named_parameters(), self.model.parameters(), strict=True):
            wanted, found = of(param), of(mine)
            zeros = torch.zeros_like(param)  # None and zeros count as equal
            found = zeros if found is None else whole(found)
            torch.testing.assert_close(
                found, zeros if wanted is None else wanted, **CLOSE, msg=lambda text, name=name: f"{name}: {text}"
            )

    # ---- actions

    def train(self) -> None:
        """Train on some microbatches, maybe clip, and maybe run an optimizer step."""
        batches, reduce_last = self.random.choice((1, 1, 2, 3)), self.random.random() < 0.5
        clips, steps, to_none = (self.random.random() < share for share in (0.3, 0.85, 0.7))
        for batch in range(batches):
            self.step += 1
            backward = self.random.choice(BACKWARDS)
            if backward is _auxiliary_first and self.roots_blocks:  # see `roots_blocks`
                backward = _with_auxiliary
            self.said.append(f"train {batch + 1} of {batches}: {backward.__name__}, reduces last: {reduce_last}")
            self.model.set_requires_gradient_sync(batch + 1 == batches or not reduce_last)
            for rank in range(self.world):
                backward(self.plain, tokens_of(rank, self.step), tokens_of(rank, -self.step), 1 / self.world)
            backward(self.model, tokens_of(self.rank, self.step), tokens_of(self.rank, -self.step), 1.0)
        self._assert_same(lambda param: param.grad)
        if clips:
            norms = [cs.clip_grad_norm_(self.model.parameters(), 0.5)]
            norms.append(nn.utils.clip_grad_norm_(self.plain.parameters(), 0.5))
            torch.testing.assert_close(whole(norms[0]), norms[1], **CLOSE)
        if steps:
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
        self._assert_same(Tensor.detach)

    def evaluate(self) -> None:
        """Run a forward without backward, with or without an autograd graph."""
        around = self.random.choice((torch.no_grad, torch.inference_mode, contextlib.nullcontext))
        self.said.append(f"evaluate under {around.__name__}")
        tokens = tokens_of(self.rank, 9000 + self.step)
        self._both(nn.Module.eval)
        with around():
            torch.testing.assert_close(whole(self.model(tokens)), self.plain(tokens), **CLOSE)
        self._both(nn.Module.train)

    def change_forward(self) -> None:
        """Change the checkpoints, the skipped block, or the block that runs twice."""
        what = self.random.choice(("around", "inner", "left_out", "twice"))
        if what in ("around", "inner"):
            how = self.random.choice([*REENTRANT])
            self.said.append(f"checkpoints {what}: {how}")
            self._both(lambda model: [each.__setattr__(what, REENTRANT[how]) for each in (model, *model.blocks)])
            self._both(Decoder.set)
        else:
            number = self.random.randrange(-1, len(self.model.blocks))
            self.said.append(f"{what}: {number}")
            self._both(lambda model: model.set(**{what: number}))

    def fail(self) -> None:
        """Run a forward of the sharded decoder that fails."""
        number = self.random.randrange(len(self.model.blocks))
        self.said.append(f"block {number} fails")
        block = self.model.blocks[number]
        block.fails = True
        with contextlib.suppress(PlantedError):
            loss_of(self.model, tokens_of(self.rank, 1))
            assert number == self.model.left_out
        block.fails = False

    def drop(self) -> None:
        """Run a forward and drop its loss."""
        self.said.append("drop a loss")
        loss_of(self.model, tokens_of(self.rank, 2))

    def load(self) -> None:
        """Load the state dict of the unsharded decoder, with full tensors."""
        self.said.append("load")
        cs.checkpoint.load_full_state_dict(self.model, self.plain.state_dict())

    def _reshard_all(self) -> None:
        for module in self.model.modules():
            if isinstance(module, cs.FSDPModule):
                module.reshard()

    def edit(self) -> None:
        """Change values of parameters in place."""
        share, factor = self.random.randrange(3), self.random.choice((0.9, 1.1))
        self.said.append(f"edit {share}")
        self._reshard_all()  # editing unsharded parameters is an error
        with torch.no_grad():
            self._both(lambda model: [p.mul_(factor) for n, p in enumerate(model.parameters()) if n % 3 == share])

    def freeze(self) -> None:
        """Freeze or unfreeze parameters, which may be unsharded, after clearing gradients."""
        share, trains = self.random.randrange(4), self.random.random() < 0.5
        self.said.append(f"{'thaw' if trains else 'freeze'} {share}")
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self._both(lambda model: [p.requires_grad_(trains) for n, p in enumerate(model.parameters()) if n % 4 == share])

    def hook(self) -> None:
        """Register a hook on some parameters, which may be unsharded."""
        share = self.random.randrange(5)
        self.said.append(f"hook {share}")
        for model in (self.plain, self.model):
            for number, param in enumerate(model.parameters()):
                if number % 5 == share and param.requires_grad:
                    param.register_hook(lambda gradient: gradient * 0.5)

    def reshard(self) -> None:
        """Change when weights are resharded."""
        forward, wanted = self.random.random() < 0.5, self.random.random() < 0.5
        self.said.append(f"reshard after {'forward' if forward else 'backward'}: {wanted}")
        (self.model.set_reshard_after_forward if forward else self.model.set_reshard_after_backward)(wanted)

    def unshard(self) -> None:
        """Unshard a block manually, and maybe reshard it."""
        block, back = self.random.choice([*self.model.blocks]), self.random.random() < 0.5
        if isinstance(block, cs.FSDPModule):
            self.said.append(f"unshard, reshard: {back}")
            block.unshard()
            if back:
                block.reshard()

    def list_modules(self) -> None:
        """Set lists of modules to prefetch."""
        self.said.append("lists")
        blocks = [block for block in self.model.blocks if isinstance(block, cs.FSDPModule)]
        self.model.set_modules_to_forward_prefetch(self.random.sample(blocks, self.random.randrange(len(blocks) + 1)))
        blocks[-1].set_modules_to_backward_prefetch(self.random.sample(blocks, self.random.randrange(len(blocks) + 1)))

    def bound(self) -> None:
        """Set a memory budget: twice the least budget, which the error contains, or one that is large enough."""
        if not self.step:
            return  # the error would only be raised in the first forward
        budget = self.random.choice((1, 100_000))
        try:
            self.model.set_pool_policy(cs.PoolPolicy(budget=budget))
        except cs.errors.PoolBudgetError as error:
            budget = 2 * error.least  # later changes of the forward may need more memory
            self.model.set_pool_policy(cs.PoolPolicy(budget=budget))
        self.said.append(f"budget {budget}")

    def make_optimizers(self) -> None:
        """Create new optimizers, without the state of the old ones."""
        kind = self.random.choice(("SGD", "AdamW", "AdamW, one by one"))
        self.said.append(kind)
        self._reshard_all()  # an optimizer of unsharded parameters is an error
        self._both(lambda model: model.zero_grad())
        if kind == "SGD":
            self.optimizers = [torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in (self.plain, self.model)]
        else:
            each = kind != "AdamW"
            self.optimizers = [
                torch.optim.AdamW(m.parameters(), 0.01, foreach=not each) for m in (self.plain, self.model)
            ]
