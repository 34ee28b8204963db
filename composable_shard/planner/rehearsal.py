"""Rehearsals: training steps that run with fake tensors. Memory is counted, but nothing is allocated or computed.

`advise` derives memory from plans. A rehearsal runs a program, or the sharded model itself, as one rank of a world
whose other ranks do not exist, so everything that it allocates is counted. This takes longer. Tests compare the planner
with rehearsals.

Most tensors have no values. If the program reads one, numbers are 1, conditions are false, and masks select everything.
Small tensors that do not depend on parameters keep their values. `torch.compile` does nothing, and nothing is saved.
"""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import checkpoint, testing
from .._group.refresh import NodeCopies
from .._memory.elsewhere import Rehearsed, rehearsing
from .._memory.offload import offload_optimizer
from .._memory.slots import Slot
from .._policies import AS_IT_IS, CommPolicy, CPUOffloadPolicy, DiskOffloadPolicy, HostOffloadPolicy, OffloadPolicy
from .._torch.core import current_backward, has_memory, plain_parts, tree_tensors
from .._torch.tracing import Guesses, ProgramMode, seen_as_real, with_values
from .._wrap import shard_auto
from ..errors import ShardConfigStateError, ShardConfigValueError
from ..optim import in_backward, owned
from ..optim._checks import IN_PARTS
from .checkpointing import checkpoint_modules
from .linear import Float8Weight, convert_layers
from .live import LiveBytes
from .memory import Bytes
from .off_device import OffDevice, Offloaded
from .precision import Precision
from .profile import materialize
from .sources import Source, check_linear, named_blocks, parallelize
from .stepping import ADAMW, IN_BACKWARD, check_optimizer, is_possible
from .strategies import DISK_MEMORY, Layout, Strategy

_STEPS = 3


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The memory of a program on one device.

    Attributes:
        ranks: world size.
        steps: number of steps that ran, of the first optimizer that stepped.
        peak: bytes of tensors at the peak. The whole pool and weights that are gathered in float8 count as
            `unsharded`, and `activations` is the remainder.
        step: the step of the peak, from 1.
        phase: the phase of the peak: ``forward`` (and everything outside the other phases), ``backward`` or
            ``optimizer``.
        guessed: operators whose output shapes depend on values of tensors. The largest possible shapes were assumed.
        offloaded: largest number of bytes on the host and on disk after a step. They are not included in `peak`.
            Offload policies are followed as on a machine with an accelerator.
    """

    ranks: int
    steps: int
    peak: Bytes
    step: int
    phase: str
    guessed: tuple[str, ...]
    offloaded: Offloaded = field(default_factory=Offloaded)


def rehearse(program: Callable[[], object], ranks: int = 1, steps: int = 3) -> Rehearsal:
    """Run a training program until its optimizer has stepped a number of times, and count its memory.

    Args:
        program: makes a model and trains it. It may call `torch.distributed.init_process_group`, as under a launcher.
        ranks: world size. The program is rank 0.
        steps: number of steps. The program is ended in the next step of its first optimizer. The first steps allocate
            memory that later steps keep: optimizer state and pools.

    Raises:
        ShardConfigStateError: no optimizer has stepped.
        ShardConfigValueError: the number of ranks or steps is invalid.
        Exception: any error of the program.
    """
    return _rehearsed(lambda watch: program(), ranks, steps)


def rehearse_source(
    source: Source,
    strategy: Strategy,
    precision: Precision,
    sequences: int,
    optimizer: str = ADAMW,
    comm: CommPolicy = AS_IT_IS,
) -> Rehearsal:
    """Shard a model, train it for some steps, and count the memory of these steps.

    Args:
        source: the model.
        strategy: the strategy. Tensor parallelism is only supported for shapes; the ranks that share tensors then share
            one batch with `sequences` for each of them.
        precision: precision of the parameters.
        sequences: sequences in the batch of a rank.
        optimizer: as in `advise`.
        comm: the precision in which weights and gradients are sent.

    Raises:
        ShardConfigValueError: the strategy cannot be rehearsed.
    """
    layout = strategy.layout
    check_optimizer(optimizer, (layout.tensor,))
    check_linear(precision.linear, layout.tensor, source.adapters, comm)
    if strategy.offloads and not is_possible(optimizer, strategy):
        raise ShardConfigValueError(f"{strategy}: cannot be planned with {optimizer!r}")
    if strategy.few:
        raise ShardConfigValueError(
            f"{strategy}: resharding to a few ranks cannot be rehearsed, because its process groups are made from "
            "values of tensors; `advise` predicts it"
        )

    def program(watch: _Watch) -> None:
        model, step = source.made()
        mesh = _cut(model, layout)
        materialize(model, precision.stored)
        blocks = named_blocks(model).values()
        if precision.linear is not None:
            convert_layers(blocks, precision.linear, strategy.name != "none", traces=False)
        checkpoint_modules(blocks, strategy.checkpointing)
        if strategy.name != "none":
            settings: Any = {"strategy": strategy.name, "replicas": layout.replicas, "mp_policy": precision.policy}
            shard_auto(model, mesh=mesh, comm_policy=comm, offload_policy=_policy(strategy), **settings)
        optimizers = _optimizers(model, optimizer)
        if strategy.disk or strategy.state:
            offload_optimizer(optimizers[0])  # the only one
        watch.counter.note(model.parameters())
        watch.counter.reset()  # ignore the unsharded model, which a program can avoid with the meta device
        while True:
            with loss_parallel():
                step(model, sequences * layout.tensor).backward()  # type: ignore[no-untyped-call]
            for each in optimizers:
                each.step()
                each.zero_grad()

    return _rehearsed(program, layout.tensor * layout.shard * layout.replicas, _STEPS)


def _policy(strategy: Strategy) -> OffloadPolicy:
    if strategy.state:
        return HostOffloadPolicy()
    if strategy.disk:
        return DiskOffloadPolicy("offload", DISK_MEMORY)  # nothing is written to disk
    return CPUOffloadPolicy() if strategy.offload else OffloadPolicy()


def _optimizers(model: nn.Module, name: str) -> list[Optimizer]:
    """The optimizers of a model for a name of `advise`."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name == IN_BACKWARD:
        return [in_backward(model, lambda _: torch.optim.AdamW(trained, fused=True))]
    return [torch.optim.AdamW(trained, fused=True)] if name == ADAMW else _muon_and_adamw(model, trained)


def _muon_and_adamw(model: nn.Module, trained: list[nn.Parameter]) -> list[Optimizer]:
    blocks = {parameter for block in named_blocks(model).values() for parameter in block.parameters()}
    matrices = [parameter for parameter in trained if parameter.ndim in (2, 3) and parameter in blocks]
    in_muon = {*matrices}
    adamw = torch.optim.AdamW([parameter for parameter in trained if parameter not in in_muon], fused=True)
    return [owned(torch.optim.Muon, matrices), adamw]


def _cut(model: nn.Module, layout: Layout) -> DeviceMesh | None:
    """Apply tensor parallelism. Return the mesh of the other dimensions, or None for all ranks."""
    if layout.tensor == 1:
        return None
    sizes = {"replicate": layout.replicas, "shard": layout.shard, "tensor": layout.tensor}
    sizes = {name: size for name, size in sizes.items() if size > 1}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    parallelize(model, mesh["tensor"])
    return mesh[tuple(name for name in sizes if name != "tensor")] if len(sizes) > 1 else None


def _rehearsed(program: Callable[[_Watch], object], ranks: int, steps: int) -> Rehearsal:
    if steps < 1:
        raise ShardConfigValueError(f"steps: expected at least 1, got {steps}")
    mode = ProgramMode()
    guesses = Guesses(mode)
    with rehearsing() as elsewhere:
        watch = _Watch(steps, elsewhere)
        with _world(ranks), watch.hooked(), mode, watch.counter, guesses:
            try:
                program(watch)
            except _Over:
                pass
            except SystemExit as left:
                if left.code:
                    raise
    return watch.result(ranks, tuple(sorted(guesses.operators)))


class _Over(BaseException):
    """Ends a program. It is not an `Exception`, so that programs do not catch it."""


class _Watch:
    """Counts optimizer steps, and splits the bytes of the peak by category while their owners still exist."""

    def __init__(self, steps: int, elsewhere: Rehearsed) -> None:
        self._wanted, self._steps, self._is_stepping = steps, 0, False
        self._first: weakref.ref[Optimizer] | None = None
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._peak, self._known = Bytes(), 0
        self._elsewhere, self._offloaded = elsewhere, Offloaded()
        self._off_device = OffDevice(elsewhere, self._optimizers)
        self.counter = LiveBytes(self._where, self._counts, self._off_device.tensors)

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Context in which the steps of all optimizers are counted."""
        before = register_optimizer_step_pre_hook(self._before)
        after = register_optimizer_step_post_hook(self._after)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def result(self, ranks: int, guessed: tuple[str, ...]) -> Rehearsal:
        """The result of the rehearsal.

        Raises:
            ShardConfigStateError: no optimizer has stepped.
        """
        if not self._steps:
            raise ShardConfigStateError(
                "the program ended before any optimizer stepped: pass a program that trains a model"
            )
        step, phase = self.counter.at
        return Rehearsal(ranks, self._steps, self._peak, step, phase, guessed, self._offloaded)

    def _counts(self, tensor: torch.Tensor) -> bool:
        """Whether the device would hold the memory of a tensor. Meta tensors have none."""
        return not has_memory(tensor) and tensor.device.type != "meta" and not self._elsewhere.steps

    def _where(self) -> tuple[int, str]:
        if self._is_stepping:
            return self._steps, "optimizer"
        return self._steps + 1, "forward" if current_backward() < 0 else "backward"

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizers.add(optimizer)
        self._look()
        if optimizer in IN_PARTS:  # its wrapper counts the step
            return
        if self._first is None or self._first() is None:
            self._first = weakref.ref(optimizer)
        if self._first() is optimizer:
            if self._steps == self._wanted:
                raise _Over
            self._steps += 1
        self._is_stepping = True

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._is_stepping &= optimizer in IN_PARTS
        self._offloaded = self._offloaded.most(self._off_device.now())
        self._look()

    def _look(self) -> None:
        """Split the bytes of the peak by category, if the peak is new."""
        counter = self.counter
        if counter.peak == self._known:
            return
        self._known = counter.peak
        stored = _parameters(self._optimizers)
        shards = [part for each in stored for part in plain_parts(each)]
        gradients = counter.bytes_at_peak([each.grad for each in stored if each.grad is not None])
        states = tree_tensors([list(each.state.values()) for each in self._optimizers])
        kept, moments = counter.bytes_at_peak(shards), counter.bytes_at_peak(states)
        pool, copies = counter.bytes_at_peak(_unsharded()), counter.bytes_at_peak(_copies())
        rest = counter.peak - kept - moments - gradients - pool - copies
        self._peak = Bytes(kept, moments, gradients, rest, pool, copies=copies)


def _unsharded() -> list[torch.Tensor]:
    """The slots of all pools, and the weights that are gathered in float8, which are not in a pool."""
    slots = [each.typed(torch.uint8) for each in gc.get_objects() if type(each) is Slot]
    return slots + [each.content for each in gc.get_objects() if type(each) is Float8Weight and each.is_gathered]


def _copies() -> list[torch.Tensor]:
    """The compute copies of all nodes (`outer_sharding`)."""
    return [tensor for each in gc.get_objects() if type(each) is NodeCopies for tensor in each.tensors()]


def _parameters(optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    """The parameters of all live modules and of the optimizers."""
    owners = [vars(each).get("_parameters", {}) for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    stored = [each for owner in owners for each in owner.values()]
    stored += [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
    return list({id(each): each for each in stored if _is_leaf(each)}.values())


def _is_leaf(parameter: nn.Parameter | None) -> bool:
    """Whether a parameter is a leaf. During backward, modules have unsharded parameters, which are views."""
    return parameter is not None and parameter.is_leaf


@contextlib.contextmanager
def _world(ranks: int) -> Iterator[None]:
    """Set the environment of a launcher, and replace functions that need devices or other ranks."""
    environment = {name: str(ranks) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment))
        stack.enter_context(testing.fake(ranks))
        stack.enter_context(seen_as_real())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(warnings.catch_warnings())
        # Weights that define their own all-gather are found by address, and those of fake storages are harmless.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        for owner, name, instead in _INSTEAD:
            stack.enter_context(mock.patch.object(owner, name, instead))
        yield


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces functions whose work is done already, or must not be done."""


_compile, _new_group = torch.compile, dist.new_group
_format, _numpy = torch.Tensor.__format__, torch.Tensor.numpy


def _fake_subgroup(ranks: list[int] | None = None, *args: Any, **kwargs: Any) -> Any:
    return _new_group(ranks)  # with the backend of the world, for any requested backend


def _own_object_of_all(values: list[Any], value: Any, group: Any = None) -> None:
    values[:] = [value] * len(values)


def _own_object_gathered(value: Any, values: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
    if values is not None:
        _own_object_of_all(values, value)


def _first_object(out: list[Any], values: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
    out[0] = values[0] if values else None


def _numpy_of_fakes(tensor: torch.Tensor, *, force: bool = False) -> Any:
    return _numpy(tensor, force=force) if has_memory(tensor) else with_values(_numpy, tensor)


def _format_of_fakes(tensor: torch.Tensor, spec: str) -> str:
    if has_memory(tensor) or tensor.dim():
        return str(_format(tensor, spec))  # type: ignore[no-untyped-call]
    return format(tensor.item(), spec)


def _compile_by_nothing(model: Any = None, **settings: Any) -> Any:
    return _compile(model, backend="eager", disable=settings.get("disable", False))


def _step_unscaled(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    return optimizer.step(*args, **kwargs)


_INSTEAD: tuple[tuple[Any, str, Any], ...] = (
    (dist, "init_process_group", _nothing),
    (dist, "destroy_process_group", _nothing),
    (dist, "new_group", _fake_subgroup),
    (dist, "all_gather_object", _own_object_of_all),
    (dist, "gather_object", _own_object_gathered),
    (dist, "broadcast_object_list", _nothing),
    (dist, "scatter_object_list", _first_object),
    (torch.Tensor, "numpy", _numpy_of_fakes),
    (torch.Tensor, "__format__", _format_of_fakes),
    (torch, "compile", _compile_by_nothing),
    (torch.amp.GradScaler, "step", _step_unscaled),
    (torch, "save", _nothing),
    (dcp, "save", _nothing),
    (checkpoint, "save", _nothing),
)
