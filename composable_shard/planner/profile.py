"""Profile a step of a model in a trace with fake tensors: operations, bytes moved, and live bytes.

A trace allocates and computes nothing, so a model of any size can be traced on a laptop. Shapes, dtypes, activation
checkpointing and tensor parallelism are those of the model, because the model runs. The trace does not contain
data-parallel sharding: gradients leave it when autograd has accumulated them, and `memory.py` and `timing.py` calculate
what happens to parameters.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from .._torch.core import current_backward, tree_tensors
from .._torch.tracing import bytes_of_operator, collective_bytes, flops_of_operator

ROOT = ""
FORWARD, BACKWARD = "forward", "backward"
FUSED = "fused"  # dtype of the kernels of compiled blocks


@dataclass(frozen=True, slots=True)
class Work:
    """An operator, with everything that determines its time.

    Attributes:
        flops: floating-point operations of matrix products. A multiplication and an addition count as two.
        nbytes: bytes read and written in memory.
        dtype: dtype of its first floating-point argument, without ``torch.``; ``float8`` or ``mxfp8`` for all products
            in 8 bits, and `FUSED` for kernels of compiled blocks.
        sent: bytes of a collective of tensor parallelism; 0 for other operators.
    """

    flops: int
    nbytes: int
    dtype: str
    sent: int = 0


@dataclass
class Segment:
    """The part of a step between two marks.

    Attributes:
        direction: `FORWARD` or `BACKWARD`.
        group: FQN of the group that computes; `ROOT` between groups.
        begins: whether a use of the group begins here.
        activations: largest number of live bytes, including gradients of the group's parameters that wait for its end.
        rests: bytes that are live at the end.
        work: number of runs of each operator.
    """

    direction: str
    group: str
    begins: bool
    activations: int = 0
    rests: int = 0
    work: Counter[Work] = field(default_factory=Counter)

    def see(self, nbytes: int) -> None:
        """Record the live bytes at a moment."""
        self.activations = max(self.activations, nbytes)

    def end(self, nbytes: int) -> None:
        """Record the live bytes at the end."""
        self.rests = nbytes


@dataclass(frozen=True)
class Profile:
    """A step of a model on one rank, without data-parallel sharding.

    Attributes:
        segments: the segments in order of time.
        tokens: tokens in the batch of a rank.
    """

    segments: tuple[Segment, ...]
    tokens: int


def profile(
    model: nn.Module,
    groups: Mapping[str, nn.Module],
    step: Callable[[], torch.Tensor],
    tokens: int,
    compiles: bool = False,
) -> Profile:
    """Trace a step.

    Args:
        model: a model with fake parameters (made in ``FakeTensorMode``) in the compute dtype.
        groups: by FQN, the modules to shard, without the model itself.
        step: runs forward and returns the loss. Backward is run here.
        tokens: tokens in the batch.
        compiles: whether the modules in `groups` are compiled (see `Kernel`).
    """
    tracker = _Tracker(model, compiles)
    with contextlib.ExitStack() as stack:
        for fqn, module in groups.items():
            for handle in _marked(tracker, fqn, module):
                stack.callback(handle.remove)
        for parameter in model.parameters():
            if parameter.requires_grad:
                stack.callback(_on_gradient(parameter, tracker.accumulated).remove)
        with tracker:
            loss = step()
            tracker.mark(BACKWARD, ROOT)
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
            tracker.mark(BACKWARD, ROOT)
    return Profile(tuple(tracker.segments), tokens)


class _Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts live bytes and operators from mark to mark."""

    def __init__(self, model: nn.Module, compiles: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.segments = [Segment(FORWARD, ROOT, True)]
        self._live = 0
        self._gradients = 0  # bytes of the group whose backward runs
        self._storages: dict[int, int] = {}  # bytes by address of an activation's storage
        self._owned = {_key(storage) for tensor in _held(model) for storage in _storages(tensor)}
        self._compiles, self._kernel = compiles, _Kernel()

    def mark(self, direction: str, group: str, begins: bool = False) -> None:
        """Begin a segment: a use of a group begins, or the root continues."""
        self._end_kernel()
        self._gradients = 0
        self.segments[-1].end(self._live)
        self.segments.append(Segment(direction, group, begins, activations=self._live))

    def accumulated(self, parameter: torch.Tensor) -> None:
        """Count a gradient no longer as an activation, but as a gradient that waits for the end of its group."""
        for storage in _storages(parameter.grad):
            self._end_kernel()  # the gradient is one of its results
            nbytes = self._storages.pop(_key(storage), 0)
            self._live -= nbytes
            self._gradients += nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor runs operators and collectives on local tensors, which arrive separately
        out = func(*args, **(kwargs or {}))
        inputs = list(tree_tensors((args, kwargs or {})))
        self._seen(func, inputs, out, args, kwargs or {})
        return out

    def _seen(self, func: Any, inputs: list[torch.Tensor], out: Any, args: Any, kwargs: Any) -> None:
        outputs = list(tree_tensors(out))
        known = {_key(storage) for tensor in inputs for storage in _storages(tensor)}
        made = [storage for tensor in outputs for storage in _storages(tensor) if _key(storage) not in known]
        work = _work(func, inputs, outputs, out, args, kwargs)
        fuses = self._fuses(work)
        if work.nbytes:
            self._count(work, fuses)
        for storage in made:
            self._made(storage, fuses)
        if fuses:
            self._kernel.add(inputs, outputs, func._schema.is_mutable)
        self.segments[-1].see(self._live + self._gradients)

    def _count(self, work: Work, fuses: bool) -> None:
        if not fuses or self._kernel.is_full:
            self._end_kernel()
        if not fuses:
            self.segments[-1].work[work] += 1

    def _fuses(self, work: Work) -> bool:
        """Whether an operator becomes a part of a kernel of a compiled block."""
        compiles = self._compiles and self.segments[-1].group != ROOT
        return compiles and work.nbytes > 0 and not work.flops and not work.sent

    def _end_kernel(self) -> None:
        kernel, self._kernel = self._kernel, _Kernel()
        self._live += sum(kernel.results.values())
        segment = self.segments[-1]
        segment.see(self._live + self._gradients)
        if nbytes := kernel.nbytes:
            segment.work[Work(0, nbytes, FUSED)] += 1

    def _made(self, storage: torch.UntypedStorage, fuses: bool) -> None:
        key = _key(storage)
        if key in self._storages or key in self._owned:
            return
        self._storages[key] = storage.nbytes()
        if fuses:
            self._kernel.results[key] = storage.nbytes()
        else:
            self._live += storage.nbytes()
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        nbytes = self._storages.pop(key, 0)
        if self._kernel.results.pop(key, None) is None:  # results of a kernel are live from its end on
            self._live -= nbytes


class _Kernel:
    """A kernel of a compiled block: all operators between two matrix products, attentions or collectives.

    It reads each tensor from before it once, and writes only results that are used after it. Compilers may recompute
    results instead of saving them for backward, or split kernels. This is not modeled.

    Attributes:
        results: bytes of live tensors that it has made, by the key of their storage.
        is_full: whether no operator can follow, because a number depends on the results of all of its threads.
    """

    def __init__(self) -> None:
        self.results: dict[int, int] = {}
        self.is_full = False
        self._reads: dict[int, int] = {}
        self._changes: dict[int, int] = {}

    def add(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor], changes: bool) -> None:
        """Add an operator. `changes` is whether it writes outputs in place."""
        for tensors, known in ((inputs, self._reads), (outputs if changes else [], self._changes)):
            for tensor in tensors:
                for storage in _storages(tensor):
                    key = _key(storage)
                    if key not in self.results:  # an expanded view has more bytes than its storage
                        known[key] = max(known.get(key, 0), min(tensor.nbytes, storage.nbytes()))
        self.is_full = max(each.numel() for each in outputs) == 1

    @property
    def nbytes(self) -> int:
        """Bytes that it reads and writes in memory."""
        return sum(sum(each.values()) for each in (self._reads, self._changes, self.results))


def _key(storage: torch.UntypedStorage) -> int:
    return int(storage._cdata)


def _on_gradient(parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Any:
    return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _held(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _storages(tensor: Any) -> list[torch.UntypedStorage]:
    if tensor is None:
        return []
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return [local.untyped_storage()]


def _work(func: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor], out: Any, args: Any, kwargs: Any) -> Work:
    nbytes = bytes_of_operator(func, inputs, outputs)
    if not nbytes:
        return Work(0, 0, "")
    flops, sent = flops_of_operator(func, args, kwargs, out), collective_bytes(func, outputs)
    return Work(flops, nbytes, _dtype(inputs), sent)


def _dtype(inputs: list[torch.Tensor]) -> str:
    name = next((str(each.dtype).removeprefix("torch.") for each in inputs if each.is_floating_point()), "float32")
    if not name.startswith("float8_e"):
        return name
    return "mxfp8" if any(each.dtype == torch.float8_e8m0fnu for each in inputs) else "float8"


class _Marks:
    """Marks the uses of a group: forward, backward, and recomputation in an activation checkpoint."""

    def __init__(self, tracker: _Tracker, fqn: str) -> None:
        self._tracker, self._fqn = tracker, fqn
        self._used = 0  # forwards whose backward has not begun

    def before(self, *_: Any) -> None:
        """Mark the beginning of forward, or of a recomputation."""
        if current_backward() < 0:
            self._tracker.mark(FORWARD, self._fqn, begins=True)
        else:
            self._reached()

    def after(self, _: nn.Module, arguments: Any, output: Any) -> None:
        """Mark the end of forward."""
        if current_backward() >= 0:
            return
        self._tracker.mark(FORWARD, ROOT)
        nodes = _nodes(output)
        self._used += bool(nodes)
        for node in nodes:
            node.register_prehook(self._reached)
        for node in _nodes(arguments):
            node.register_prehook(self._over)

    def _reached(self, *_: Any) -> None:
        if self._used:
            self._used -= 1
            self._tracker.mark(BACKWARD, self._fqn, begins=True)

    def _over(self, *_: Any) -> None:
        if self._tracker.segments[-1].group == self._fqn:
            self._tracker.mark(BACKWARD, ROOT)


def _nodes(tensors: Any) -> list[Any]:
    return list({tensor.grad_fn for tensor in tree_tensors(tensors) if tensor.grad_fn is not None})


def _marked(tracker: _Tracker, fqn: str, module: nn.Module) -> list[Any]:
    marks = _Marks(tracker, fqn)
    return [module.register_forward_pre_hook(marks.before), module.register_forward_hook(marks.after)]


def materialize(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Replace meta or fake tensors of a model by fake parameters and buffers on the CPU. Call it in ``FakeTensorMode``.

    Args:
        model: changed in place. Tied parameters stay tied.
        dtype: new dtype of floating-point parameters. None keeps their dtypes.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = _fake_parameter(parameter, dtype)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")


def _fake_parameter(parameter: nn.Parameter, dtype: torch.dtype | None) -> nn.Parameter:
    wanted = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    if isinstance(parameter, DTensor):
        data: torch.Tensor = parameter.detach().to(wanted)
    else:
        data = torch.empty(parameter.shape, dtype=wanted)
    return nn.Parameter(data, requires_grad=parameter.requires_grad)


def repeated(traced: Profile, names: list[str]) -> Profile:
    """Derive the profile of a model with more blocks from the profile of the same model with three blocks.

    The first and the last block are next to other parts of the model. All other blocks do the same work as the second
    block and leave the same number of bytes live.

    Args:
        traced: profile of a model with three equal blocks, each a group, that run one after the other.
        names: FQNs of the blocks of the larger model, in order; at least three.
    """
    passes = _uses(traced)
    grows = passes[FORWARD][2][-1].rests - passes[FORWARD][1][-1].rests
    more = len(names) - 3
    segments: list[Segment] = []
    for direction, order in ((FORWARD, range(len(names))), (BACKWARD, reversed(range(len(names))))):
        root, *blocks = passes[direction]
        segments += [_moved(each, each.group, grows * more if direction == BACKWARD else 0) for each in root]
        turns = dict(zip((0, 1, 2) if direction == FORWARD else (2, 1, 0), blocks, strict=True))
        for index in order:
            turn = min(index, 1) if index < len(names) - 1 else 2
            for each in turns[turn]:
                segments.append(_moved(each, names[index] if each.group else ROOT, grows * (index - turn)))
    return Profile(tuple(segments), traced.tokens)


def _uses(traced: Profile) -> dict[str, list[list[Segment]]]:
    """By direction: the segments before the first use of a group, then those from each use up to the next."""
    uses: dict[str, list[list[Segment]]] = {FORWARD: [[]], BACKWARD: [[]]}
    for segment in traced.segments:
        if segment.begins and segment.group:
            uses[segment.direction].append([])
        uses[segment.direction][-1].append(segment)
    return uses


def _moved(segment: Segment, group: str, nbytes: int) -> Segment:
    return replace(segment, group=group, activations=segment.activations + nbytes, rests=segment.rests + nbytes)
