"""A dispatch mode that reports to `Memory` the tensors that each operator reads and writes, and its call stack."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..._torch.core import current_node
from .._torch import python_kernel
from .memory import Memory, Operator, Stack
from .nodes import Nodes
from .streams import Stream, Streams

_PLAIN = (Tensor, torch.nn.Parameter)
_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "_dtensor")  # `Network` records these
_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_FRAMES = 60  # number of frames that are kept of a stack
_OF_THE_MODE = ("_compile.py", "eval_frame.py")  # files of torch with frames between an operator and its mode


class Launches:
    """Numbers the operators and collectives, and records their accesses.

    Args:
        streams, nodes: streams and autograd nodes of the program.
        memory: records the accesses.
    """

    def __init__(self, streams: Streams, nodes: Nodes, memory: Memory) -> None:
        self._streams, self._nodes, self._memory = streams, nodes, memory
        self._on_host: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # storages in host memory, by key
        self.count = 0

    def keep_on_host(self, tensors: Iterable[Tensor]) -> None:
        """Treat these tensors as host memory. Operators that use no other tensors run on the host."""
        for tensor in tensors:
            self._on_host[_key(tensor)] = weakref.ref(tensor.untyped_storage())

    def launch(self, name: str, stream: Stream, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Operator:
        """Record that an operator or collective reads and writes these tensors on a stream."""
        self.count += 1
        self._streams.rules.launch(stream, name)
        operator = Operator(name, stream, stream.advance(), stack_here())
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                self._memory.know(tensor.untyped_storage(), self._streams.compute)
                self._memory.use(tensor, is_write, operator)
        return operator

    def call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], watch: Watch) -> Any:
        """Run an operator on the current stream. If it is written in Python, `watch` records the operators it calls."""
        self._nodes.look()
        written, read = _arguments(func, args, kwargs)
        parts = python_kernel(func)
        if parts is None:
            result = func(*args, **kwargs)
        else:
            with watch:
                result = parts(*args, **kwargs)
        outputs = _tensors(result)
        given = {_key(tensor) for tensor in (*written, *read)}
        made = [tensor for tensor in outputs if _key(tensor) not in given]
        stream, adds = self._stream([*read, *written], made)
        self._nodes.note_given(read, stream)
        if parts is None and (made or written or not outputs):  # otherwise it is a view
            self._note(func, stream, read, written, made)
        if adds:
            self._nodes.added(read, stream)
        if torch.is_grad_enabled():
            self._nodes.note_made(outputs, stream)
        return result

    def _note(
        self, func: Any, stream: Stream, read: list[Tensor], written: list[Tensor], made: Sequence[Tensor]
    ) -> None:
        if func.namespace in _COLLECTIVES:
            for tensor in made:
                self._memory.know(tensor.untyped_storage(), stream)
            return
        name = str(func)
        if func.overloadpacket is torch.ops.aten._local_scalar_dense:
            self._streams.rules.read("Tensor.item")
        if "empty" in name or func.overloadpacket is torch.ops.aten.set_:  # no kernel on the stream
            operator = Operator(name, stream, stream.count, stack_here())
        else:
            operator = self.launch(name, stream, read, written)
        for tensor in made:
            self._memory.allocate(tensor.untyped_storage(), operator)

    def _stream(self, given: Sequence[Tensor], made: Sequence[Tensor]) -> tuple[Stream, bool]:
        """The stream on which an operator runs, and whether it is autograd's addition of gradients."""
        if self._on_host and self._is_of_host(given):
            self.keep_on_host(made)
            return self._streams.host, False
        current = self._streams.current()
        if _is_of_engine(_outer_frame()) and (adder := self._nodes.adder()) is not None:
            return adder, True
        return current, False

    def _is_of_host(self, given: Sequence[Tensor]) -> bool:
        """Whether all inputs of an operator are in host memory."""
        return bool(given) and all(self.lies_on_host(tensor) for tensor in given)

    def lies_on_host(self, tensor: Tensor) -> bool:
        """Whether a tensor is in host memory."""
        known = self._on_host.get(_key(tensor))
        return known is not None and known() is tensor.untyped_storage()

    def resize(self, storage: torch.UntypedStorage, resize: Callable[[], Any]) -> Any:
        """Resize a storage, and record its new memory or that its memory was freed."""
        before = storage.data_ptr()
        result = resize()
        stream = self._streams.current()
        self._memory.resized(before, storage, Operator("storage.resize_", stream, stream.count, stack_here()))
        return result


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which all operators of this thread are launched through `launches`."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._launches = launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, FakeTensor) for kind in types):  # fake tensors have no memory
            return func(*args, **(kwargs or {}))
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # torch then calls the tensor's class, and this mode sees the operators it calls
        return self._launches.call(func, args, kwargs or {}, self)


@functools.cache
def _parameters(func: Any) -> tuple[tuple[int, str, bool], ...]:
    """For each argument of an operator: its index (-1 if keyword-only), its name, and whether it is written."""
    of_schema = enumerate(func._schema.arguments)
    return tuple([(-1 if arg.kwarg_only else i, arg.name, _is_written(arg)) for i, arg in of_schema])


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operator writes, and those that it reads, by its schema."""
    writes: list[Tensor] = []
    reads: list[Tensor] = []
    for index, name, is_written in _parameters(func):
        given = args[index] if 0 <= index < len(args) else kwargs.get(name)
        if isinstance(given, (Tensor, list, tuple)):
            (writes if is_written else reads).extend(_tensors(given))
    return writes, reads


def _tensors(tree: Any) -> list[Tensor]:
    """The strided CPU tensors of a tree."""
    leaves = (tree,) if isinstance(tree, Tensor) else pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and _has_memory(leaf)]


def _has_memory(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.device.type == "cpu" and tensor.layout is torch.strided


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _outer_frame() -> FrameType | None:
    """The innermost frame outside of this folder and of torch's dispatch code: it called the operator."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_between(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


@functools.cache
def _is_between(file: str) -> bool:
    return file.startswith(_HERE) or (file.startswith(_TORCH) and file.endswith(_OF_THE_MODE))


def _is_of_engine(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def stack_here() -> Stack:
    """The current call stack, innermost line first, and the name of the running autograd node."""
    frame = _outer_frame()
    lines: list[tuple[CodeType, int]] = []
    while frame is not None and len(lines) < _FRAMES:
        lines.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    node = current_node()
    return Stack(tuple(lines), "" if node is None else node.name())
