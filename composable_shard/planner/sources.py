"""The model to plan for: a shape, a Hugging Face configuration on disk, or a function that makes a model."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._pytree import tree_map_only

from .. import testing
from .._api import fully_shard
from .._module.module import FSDPModule
from .._module.status import make_plan
from .._plan.group_plan import GroupPlan
from .._plan.plan import ShardPlan
from .._policies import AS_IT_IS, CommPolicy
from .._torch.tracing import Guesses, ProgramMode, seen_as_real
from .._wrap import repeated_blocks
from ..errors import ShardConfigTypeError, ShardConfigValueError
from . import decoder
from .checkpointing import Checkpointing, checkpoint_modules
from .linear import FLOAT8, LinearFormat, convert_layers
from .precision import Precision
from .profile import Profile, materialize, profile, repeated
from .shape import NAMED, Shape

Step = Callable[[nn.Module, int], Tensor]  # takes a model and a number of sequences; returns the loss
Made = nn.Module | tuple[nn.Module, Step]
_TRACED_LAYERS = 3  # layers of a shape that are traced; further layers equal the second one


@dataclass(frozen=True)
class Source:
    """A model that can be made repeatedly.

    Attributes:
        name: name of the model.
        shape: the shape of a decoder; None if `factory` makes the model.
        factory: makes a model, optionally together with its step.
        sequence: tokens per sequence.
        adapters: rank of adapters (LoRA), if only these train; 0 for none. Only for shapes.
    """

    name: str
    sequence: int
    shape: Shape | None = None
    factory: Callable[[], Made] | None = None
    adapters: int = 0

    def traced(
        self,
        precision: Precision,
        checkpointing: Checkpointing,
        sequences: int,
        tensor: int = 1,
        *,
        shards: bool = True,
        compiles: bool = False,
    ) -> Profile:
        """Trace a step.

        Args:
            precision: the precision. Parameters are traced in its compute dtype.
            checkpointing: activation checkpointing of the blocks.
            sequences: sequences in the batch of a rank, or of the ranks that share tensors.
            tensor: number of ranks of tensor parallelism.
            shards: whether weights are sharded, and so may be gathered in float8.
            compiles: whether the blocks are compiled.
        """
        small = self.shape is not None and self.shape.layers > _TRACED_LAYERS
        layers = _TRACED_LAYERS if small else None
        mode = ProgramMode()
        with testing.fake(tensor) as world, seen_as_real(), mode, Guesses(mode):
            model, step = self.made(layers)
            if tensor > 1:
                parallelize(model, world.mesh)
            materialize(model, precision.compute)
            blocks = named_blocks(model)
            if precision.linear is not None:
                convert_layers(blocks.values(), precision.linear, shards, traces=True)
            checkpoint_modules(blocks.values(), checkpointing)
            if precision.compute != precision.stored:
                for module in (model, *blocks.values()):
                    module.register_forward_pre_hook(partial(_cast, precision.compute), with_kwargs=True)
            with loss_parallel():
                traced = profile(model, blocks, lambda: step(model, sequences), sequences * self.sequence, compiles)
        if not small:
            return traced
        assert self.shape is not None
        return repeated(traced, [f"blocks.{index}" for index in range(self.shape.layers)])

    def plan(self, precision: Precision, tensor: int = 1, comm: CommPolicy = AS_IT_IS) -> ShardPlan:
        """Plan the model, sharded over two ranks. `comm` is the precision in which weights and gradients are sent."""
        with testing.fake(2 * tensor, mesh={"shard": 2, "tensor": tensor}) as world, FakeTensorMode():
            model, _ = self.made()
            if tensor > 1:
                parallelize(model, world.mesh["tensor"])
            materialize(model, precision.stored)
            for module in (*named_blocks(model).values(), model):
                fully_shard(module, mesh=world.mesh["shard"], mp_policy=precision.policy)
                if isinstance(module, FSDPModule):
                    module.set_comm_policy(comm, recurse=False)
            return with_gathers(make_plan(model), float8_weights(model, precision.linear))

    def made(self, layers: int | None = None) -> tuple[nn.Module, Step]:
        """Make a model and its step. Call it in ``FakeTensorMode``.

        Args:
            layers: number of layers, if different from the shape.
        """
        if self.shape is not None:
            model = decoder.Decoder(replace(self.shape, layers=layers or self.shape.layers))
            if self.adapters:
                decoder.add_adapters(model, self.adapters)
            return model, self.step_of_decoder
        assert self.factory is not None
        made = self.factory()
        if isinstance(made, nn.Module):
            return made, self._default_step
        if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1]):
            return made
        raise ShardConfigTypeError(
            f"{self.name}: returned a {type(made).__name__}; a factory returns an nn.Module, or a pair: an nn.Module "
            "and a function that takes it and a number of sequences and returns the loss"
        )

    def step_of_decoder(self, model: nn.Module, sequences: int) -> Tensor:
        """The loss of a decoder, or of any model that takes tokens and returns logits."""
        return decoder.loss_of(model, torch.zeros(sequences, self.sequence + 1, dtype=torch.int64))

    def _default_step(self, model: nn.Module, sequences: int) -> Tensor:
        """The loss of a language model. Hugging Face models calculate it themselves.

        The cache of keys and values is disabled: training does not use it, and the recomputation of a block would
        extend it again.
        """
        names = _arguments(model)
        if "labels" not in names:
            return self.step_of_decoder(model, sequences)
        tokens = torch.zeros(sequences, self.sequence, dtype=torch.int64)
        caches = {"use_cache": False} if "use_cache" in names else {}
        return model(input_ids=tokens, labels=tokens, **caches).loss  # type: ignore[no-any-return]


def _cast(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
    """Cast floating-point arguments of a forward to the compute dtype, as mixed precision does."""
    return tree_map_only(Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, (args, kwargs))


def _arguments(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The arguments of a model's forward, by name. PEFT passes them to the inner model, so its arguments are used."""
    inner = getattr(model, "get_base_model", None)
    return inspect.signature((inner() if callable(inner) else model).forward).parameters


def source_of(model: Any, sequence: int | None = None, adapters: int = 0) -> Source:
    """Find the model that a user names.

    Args:
        model: one of

            - a `Shape`, a name in `NAMED`, or the text form of a shape (`Shape.parse`);
            - the path of a ``config.json`` or of its directory;
            - a function without arguments that makes a model, or its import path (``package.module:function``).
        sequence: tokens per sequence; None for those of the shape or the configuration.
        adapters: rank of adapters, if only these train.

    Raises:
        ShardConfigTypeError, ShardConfigValueError: an argument is invalid, or the model cannot be found.
    """
    if isinstance(model, (str, os.PathLike)):
        model = _named(os.fspath(model), sequence)
    if isinstance(model, Shape):
        shape = model if sequence is None else replace(model, sequence=sequence)
        name = next((name for name, known in NAMED.items() if known == model), "the shape")
        return Source(name, shape.sequence, shape=shape, adapters=adapters)
    if not callable(model) or isinstance(model, nn.Module):
        raise ShardConfigTypeError(
            f"model: {type(model).__name__} is not a shape, a path or a factory; give a function that makes the model, "
            "so that it can be made without memory"
        )
    if sequence is None:
        raise ShardConfigValueError("sequence: give the tokens per sequence, which a factory does not define")
    if adapters:
        raise ShardConfigValueError("adapters: only supported for shapes; let the factory return a model with adapters")
    return Source(getattr(model, "__qualname__", "the model"), sequence, factory=model)


def _named(text: str, sequence: int | None) -> Any:
    if Path(text).exists():
        return Shape.from_config(Path(text), sequence)
    module, colon, function = text.partition(":")
    if not colon:
        return Shape.parse(text)
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ShardConfigValueError(f"model: {text!r} cannot be imported: {error}") from None


def named_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that are sharded as separate groups, by FQN."""
    names = {id(module): name for name, module in model.named_modules()}
    return {names[id(module)]: module for module in repeated_blocks(model)}


def check_linear(form: LinearFormat | None, tensor: int, adapters: int, comm: CommPolicy) -> None:
    """Check that a format of linear layers can be planned with other settings.

    Raises:
        ShardConfigValueError: it cannot.
    """
    if form is None:
        return
    if tensor > 1 or adapters:
        raise ShardConfigValueError(
            f"linear_format: {form.name!r} cannot be planned with {'`tensor`' if tensor > 1 else '`adapters`'}; leave "
            "one of both at its default"
        )
    if form.gathers and comm.gather is not None:
        raise ShardConfigValueError(
            f"linear_format: {form.name!r} defines the format of gathered weights, so comm_policy cannot have "
            f"gather={comm.gather!r}; set gather to None"
        )


def float8_weights(model: nn.Module, form: LinearFormat | None) -> set[str]:
    """The FQNs of the weights that are gathered in float8."""
    if form is None or not form.gathers:
        return set()
    blocks = named_blocks(model).items()
    return {
        f"{fqn}.{name}.weight" for fqn, block in blocks for name, each in block.named_modules() if form.converts(each)
    }


def with_gathers(plan: ShardPlan, names: set[str]) -> ShardPlan:
    """The plan with these parameters gathered in float8, as their own tensor subclass does."""

    def gathered(group: GroupPlan) -> GroupPlan:
        params = [replace(each, gathered=FLOAT8) if each.fqn in names else each for each in group.params]
        return replace(group, params=tuple(params))

    return replace(plan, groups=tuple(map(gathered, plan.groups))) if names else plan


def parallelize(model: nn.Module, mesh: Any) -> None:
    """Apply tensor parallelism to the decoder of a shape over a mesh.

    Raises:
        ShardConfigValueError: it is another model, or cannot be divided evenly.
    """
    if not isinstance(model, decoder.Decoder):
        raise ShardConfigValueError(
            "tensor: only supported for shapes; let the factory return a model with tensor parallelism"
        )
    shape, ranks = model.shape, mesh.size()
    for what, number in (("heads", shape.heads), ("key_value_heads", shape.kv_heads), ("vocabulary", shape.vocabulary)):
        if number % ranks:
            raise ShardConfigValueError(f"tensor: {what}={number} cannot be divided evenly by {ranks} ranks")
    decoder.parallelize(model, mesh)
