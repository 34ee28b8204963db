"""`assert_matches_unsharded`: train a layer sharded on all ranks and unsharded on one, and compare the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._api import fully_shard
from .._torch.core import map_tensors, tree_tensors
from ..errors import ShardConfigTypeError, ShardConfigValueError
from ._difference import difference
from ._spmd import Axes, World, check_world, one_kernel_thread, spmd
from ._torch import own_part
from ._turns import RandomState

Part = tuple[torch.Tensor, tuple[int, ...] | None]  # a rank's part, and its offsets; None for a full tensor
_MOST_LINES = 12


@dataclass(frozen=True)
class Training:
    """The training that the sharded and the unsharded layer run; see `assert_matches_unsharded`."""

    make_layer: Callable[[], nn.Module]
    make_inputs: Callable[[int, int], Any]
    loss: Callable[[Any], torch.Tensor]
    optimizer: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
    steps: int
    seed: int
    backend: str | None

    def build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return self.make_layer()

    def runner(self, layer: nn.Module) -> Callable[..., Any]:
        """The layer, compiled if a backend is given."""
        return layer if self.backend is None else torch.compile(layer, backend=self.backend, fullgraph=True)

    def forward_backward(self, run: Callable[..., Any], batch: int, step: int) -> Shot:
        """Run a forward and backward with the inputs of one data-parallel rank."""
        seed = self.seed + 1_000_003 * step + batch
        torch.manual_seed(seed + 500_009)  # the sharded and the unsharded layer must get the same inputs
        given = map_tensors(_leaf, self.make_inputs(batch, step))
        torch.manual_seed(seed)  # for random operators in the layer, such as dropout
        args, kwargs = ((), given) if isinstance(given, dict) else (given if isinstance(given, tuple) else (given,), {})
        output = run(*args, **kwargs)
        self.loss(output).backward()  # type: ignore[no-untyped-call]
        return Shot(
            batch=batch,
            outputs=[tensor.detach().clone() for tensor in tree_tensors(output)],
            input_grads=[leaf.grad for leaf in tree_tensors(given)],
        )


@dataclass
class Shot:
    """The values of one step on one rank that are compared."""

    batch: int
    outputs: list[torch.Tensor]
    input_grads: list[torch.Tensor | None]
    grads: dict[str, Part | None] = field(default_factory=dict)
    params: dict[str, Part] = field(default_factory=dict)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def _mean_square(output: Any) -> torch.Tensor:
    terms = [t.float().square().mean() for t in tree_tensors(output) if t.is_floating_point()]
    if not terms:
        raise ShardConfigTypeError("loss: the output has no floating-point tensor; pass a function of the output")
    return reduce(torch.add, terms)


def _sgd(params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def _shard_whole(layer: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(layer, mesh=mesh)


def _part(tensor: torch.Tensor) -> Part:
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone(), None
    own = own_part(tensor)
    if own is None:
        with torch.no_grad():
            return tensor.full_tensor(), None
    return own[0].detach().clone(), own[1]


def _sharded_steps(world: World, training: Training, shard: Callable[..., object], batches: Batches) -> list[Shot]:
    """Train the sharded layer on one rank. Returns the values of each step."""
    layer = training.build()
    shard(layer, world.mesh)
    params = dict(layer.named_parameters())
    optimizer = training.optimizer([param for param in params.values() if param.requires_grad])
    run = training.runner(layer)
    shots = []
    for step in range(training.steps):
        shot = training.forward_backward(run, batches.of(world.mesh), step)
        for name, param in params.items():
            if layer.get_parameter(name) is not param:
                raise AssertionError(f"step {step}: {name} is not the sharded parameter after backward")
            if isinstance(param.grad, DTensor) and param.grad.placements != getattr(param, "placements", None):
                raise AssertionError(f"step {step}: the gradient of {name} is placed as {param.grad.placements}")
        shot.grads = {name: None if param.grad is None else _part(param.grad) for name, param in params.items()}
        optimizer.step()
        optimizer.zero_grad()
        shot.params = {name: _part(param) for name, param in params.items()}
        shots.append(shot)
    return shots


def _unsharded_steps(training: Training, batches: Batches) -> list[list[Shot]]:
    """Train one unsharded layer on the batches of all ranks. Returns, for each step, the values of each batch."""
    layer = training.build()
    params = dict(layer.named_parameters())
    optimizer = training.optimizer([param for param in params.values() if param.requires_grad])
    run = training.runner(layer)
    buffers = [_buffers(layer) for _ in range(batches.count)]
    steps = []
    for step in range(training.steps):
        shots, grads = [], []
        for batch in range(batches.count):
            _set_buffers(layer, buffers[batch])
            shots.append(training.forward_backward(run, batch, step))
            buffers[batch] = _buffers(layer)
            grads.append({name: param.grad for name, param in params.items()})
            optimizer.zero_grad()
        for name, param in params.items():
            param.grad = batches.mean([each[name] for each in grads])
        for shot in shots:
            shot.grads = {n: None if p.grad is None else (p.grad.clone(), None) for n, p in params.items()}
        optimizer.step()
        optimizer.zero_grad()
        for shot in shots:
            shot.params = {name: (param.detach().clone(), None) for name, param in params.items()}
        steps.append(shots)
    return steps


def _buffers(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in layer.named_buffers()}


def _set_buffers(layer: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, buffer in layer.named_buffers():
        buffer.copy_(values[name])


@dataclass(frozen=True)
class Batches:
    """The assignment of batches to ranks.

    Attributes:
        axes: axes of the mesh along which batches differ.
        sizes: sizes of these axes.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of batches."""
        return reduce(int.__mul__, self.sizes, 1)

    def of(self, mesh: DeviceMesh) -> int:
        """The batch of this rank."""
        number = 0
        for axis, size in zip(self.axes, self.sizes, strict=True):
            number = number * size + mesh.get_local_rank(axis)
        return number

    def mean(self, grads: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """The mean of the gradients of all batches, added in the order of the collectives.

        That order is the last axis first, and then the order of the ranks. None counts as zeros. If all gradients are
        None, the mean is None.
        """
        present = [grad for grad in grads if grad is not None]
        if not present:
            return None
        values = [torch.zeros_like(present[0]) if grad is None else grad for grad in grads]
        for size in reversed(self.sizes):
            values = [reduce(torch.add, values[at : at + size]) for at in range(0, len(values), size)]
        return values[0] / self.count


def _differences(rank: int, step: int, sharded: Shot, unsharded: Shot, atol: float, rtol: float) -> Iterable[str]:
    """A line for each value of the sharded layer that differs from that of the unsharded layer."""
    where = f"step {step}, rank {rank}"
    if len(sharded.outputs) != len(unsharded.outputs):
        yield f"{where}: {len(sharded.outputs)} outputs, should be {len(unsharded.outputs)}"
    for what, mine, whole in (
        ("output", sharded.outputs, unsharded.outputs),
        ("gradient of input", sharded.input_grads, unsharded.input_grads),
    ):
        for number, (a, b) in enumerate(zip(mine, whole, strict=False)):
            if text := difference(a, b, atol, rtol):
                yield f"{where}: {what} {number} {text}"
    for what, mine_of, whole_of in (
        ("gradient of", sharded.grads, unsharded.grads),
        ("updated", sharded.params, unsharded.params),
    ):
        for name, expected in whole_of.items():
            if text := _part_differs(mine_of.get(name), expected, atol, rtol):
                yield f"{where}: {what} {name} {text}"


def _part_differs(mine: Part | None, whole: Part | None, atol: float, rtol: float) -> str:
    if mine is None or whole is None:
        return difference(mine and mine[0], whole and whole[0], atol, rtol)
    (own, offsets), expected = mine, whole[0]
    for dim, offset in enumerate(offsets or ()):
        expected = expected.narrow(dim, min(offset, expected.shape[dim]), own.shape[dim])
    return difference(own, expected, atol, rtol, offsets or ())


def assert_matches_unsharded(
    make_layer: Callable[[], nn.Module],
    make_inputs: Callable[[int, int], Any],
    *,
    world_size: int = 2,
    mesh: Axes | None = None,
    batch_axes: Sequence[str] | None = None,
    shard: Callable[[nn.Module, DeviceMesh], object] = _shard_whole,
    loss: Callable[[Any], torch.Tensor] = _mean_square,
    optimizer: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer] = _sgd,
    steps: int = 3,
    compile: bool | str = False,  # noqa: A002 - for torch.compile
    atol: float = 0.0,
    rtol: float = 0.0,
    seed: int = 0,
    timeout: float = 60.0,
) -> None:
    """Assert that training a sharded layer matches training the unsharded one, bitwise unless a tolerance is given.

    The layer is sharded and trained in a simulated world (see `spmd`), on each rank with different inputs. For
    comparison, one unsharded layer is trained with the mean of the gradients of all these inputs, added in the order of
    the ranks. After each step, the outputs, the gradients of inputs and parameters, and the updated parameters are
    compared.

    The results are bitwise identical for layers that run once per forward, without tensor parallelism. Otherwise the
    sharded layer adds in another order: pass a tolerance, for example ``rtol=1e-5`` for float32.

    Args:
        make_layer: creates the layer. It is always called with the same random seed.
        make_inputs: ``make_inputs(batch, step)`` returns the inputs of a rank: a tensor, a tuple of arguments, or a
            dict of keyword arguments. `batch` is the rank unless `batch_axes` is given. The function is called for the
            sharded and for the unsharded layer. It may use torch's default generator, which is seeded for each batch
            and step.
        world_size: number of ranks.
        mesh: names and sizes of the axes of the mesh; one axis ``shard`` if None.
        batch_axes: axes along which the inputs differ; all if None. For example, all except that of tensor parallelism.
        shard: ``shard(layer, mesh)`` shards the layer; by default as one group over the whole mesh.
        loss: a function of the output; by default the mean of its squares.
        optimizer: creates an optimizer of the trainable parameters; by default SGD, because Adam hides a wrong scale of
            gradients.
        steps: number of steps.
        compile: True compiles both layers with Inductor; a string is the name of another backend.
        atol: absolute tolerance: values may differ by ``atol + rtol * |unsharded value|``.
        rtol: relative tolerance.
        seed: seed of all random numbers; dropout is the same in both layers.
        timeout: limit in seconds for training the sharded layer.

    Raises:
        AssertionError: values differ. For each, the message has the step, the rank, the name of the output or
            parameter, and the difference.
        ShardConfigTypeError, ShardConfigValueError: the arguments do not describe a world, or are invalid.
    """
    batches = _batches(check_world(world_size, mesh), batch_axes)
    if steps < 1:
        raise ShardConfigValueError(f"steps: expected at least 1, got {steps}")
    backend = ("inductor" if compile else None) if isinstance(compile, bool) else compile
    training = Training(make_layer, make_inputs, loss, optimizer, steps, seed, backend)
    run = spmd(world_size, mesh=mesh, seed=seed, timeout=timeout)
    unsharded = _beside(training, batches)
    sharded = run(_sharded_steps, training, shard, batches)
    for step in range(steps):  # only the first step with differences is reported, because they cause later ones
        pairs = [(seen[step], unsharded[step][seen[step].batch]) for seen in sharded]
        _assert_same([line for rank, pair in enumerate(pairs) for line in _differences(rank, step, *pair, atol, rtol)])


def _beside(training: Training, batches: Batches) -> list[Any]:
    """Train the unsharded layer. The random state of the caller is restored."""
    before = RandomState.now()
    try:
        with one_kernel_thread():
            return _unsharded_steps(training, batches)
    finally:
        before.restore()


def _batches(sizes: Mapping[str, int], batch_axes: Sequence[str] | None) -> Batches:
    axes = tuple(sizes) if batch_axes is None else tuple(batch_axes)
    if unknown := [axis for axis in axes if axis not in sizes]:
        raise ShardConfigValueError(f"batch_axes: the mesh has no axes {unknown}; it has {list(sizes)}")
    return Batches(axes, tuple(sizes[axis] for axis in axes))


def _assert_same(differences: Sequence[str]) -> None:
    if differences:
        more = [f"... {len(differences)} lines"] if len(differences) > _MOST_LINES else []
        text = "\n  ".join([*differences[:_MOST_LINES], *more])
        raise AssertionError(f"the sharded layer does not match the unsharded one:\n  {text}")
