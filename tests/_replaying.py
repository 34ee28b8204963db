"""Captures of CUDA graphs on a CPU: the operators and collectives of a step are recorded, and run again on new data.

Like a CUDA graph, a recording contains memory and operators, and nothing that Python decides. Memory that was freed in
the capture is private to the recording, and filled with NaN before the first replay. Memory from outside that was freed
since keeps the values that it had when it was read first. Operators also run while they are recorded, so a capture
changes data that a replay would change; `CapturedStep` in the tests restores it.
"""

from __future__ import annotations

import contextlib
import weakref

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from composable_shard._comm.lanes import WAITING
from composable_shard._torch.capturing import simulated

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_COMMUNICATES = ("c10d", "_c10d_functional")
_READS = (torch.ops.aten._local_scalar_dense,)
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_IGNORED = (torch.ops.aten.set_, torch.ops.aten.lift_fresh)


class _Memory:
    """The memory of a storage from its allocation, or its first use, until it is freed or resized.

    `before` is a copy of the values from before the capture, for memory that was not allocated in it.
    """

    def __init__(self, storage, is_outside):
        self.begin, self.nbytes = storage.data_ptr(), storage.nbytes()
        self._weak = StorageWeakRef(storage)  # while it lives, no other storage gets the same number
        self.is_over = False
        self.before = torch.empty(0, dtype=torch.uint8).set_(storage).clone() if is_outside else None
        self.buffer = None

    def storage(self):
        """The storage, if it still has this memory."""
        storage = None if self.is_over else torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        return storage if storage is not None and storage.nbytes() == self.nbytes else None

    def lives(self):
        return self.storage() is not None

    def settle(self):
        """After the capture: keep the memory if it is still in use, else use a private buffer."""
        if (storage := self.storage()) is not None:
            self.buffer = torch.empty(0, dtype=torch.uint8).set_(storage)
        elif self.before is not None:
            self.buffer = self.before
        else:
            self.buffer = torch.full((self.nbytes,), 0xFF, dtype=torch.uint8)
        self.before = None

    def restore(self):
        storage = self.storage()
        if self.before is not None and storage is not None:
            torch.empty(0, dtype=torch.uint8).set_(storage).copy_(self.before)


class _Place:
    """A tensor in recorded memory."""

    def __init__(self, tensor, memory):
        self.memory = memory
        begin = tensor.storage_offset()
        if memory.nbytes:  # the tensor's storage may be an alias of a part of the memory
            begin += (tensor.untyped_storage().data_ptr() - memory.begin) // tensor.itemsize
        self.how = tensor.dtype, begin, tensor.size(), tensor.stride(), tensor.is_conj()

    def tensor(self):
        dtype, offset, size, stride, is_conj = self.how
        made = torch.empty(0, dtype=dtype).set_(self.memory.buffer.untyped_storage(), offset, size, stride)
        return made.conj() if is_conj else made


class Recording(TorchDispatchMode):
    """Records all operators of this thread while it is active; `replay` runs them again.

    Operators of `composable_shard` in compiled graphs are recorded by the operators that they run.
    """

    @classmethod
    def is_infra_mode(cls):
        return True  # compiled code runs in spite of this mode

    def __init__(self):
        super().__init__()
        self._known = {}
        self._all = []
        self._steps = []
        self._works = []
        self._on_host = set()

    # ---- recording

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented
        if not all(map(_is_real, _tensors((args, kwargs)))):
            return func(*args, **kwargs)
        if func.namespace == "composable_shard":
            with self:
                return func.redispatch(_CPU, *args, **kwargs)
        if func.overloadpacket in _READS and self._memory_of(args[0], True) not in self._on_host:
            raise RuntimeError(f"the host reads a value in a capture ({func})")
        given = [self._memory_of(each, True) for each in _tensors((args, kwargs))]
        placed = pytree.tree_map_only(torch.Tensor, self._place, (args, kwargs))
        result = func(*args, **kwargs)
        if not all(map(_is_real, _tensors(result))):
            return result
        writes = any(arg.alias_info is not None and arg.alias_info.is_write for arg in func._schema.arguments)
        made = [self._memory_of(each, False) for each in _tensors(result)]
        communicates = func.namespace in _COMMUNICATES  # whose schemas do not tell what they write
        is_view = not (writes or communicates) and made and all(memory in given for memory in made)
        if func.overloadpacket is torch.ops.aten.scalar_tensor:
            self._on_host.update(made)  # the number of work in flight, which stays on the CPU
        if not is_view and func.overloadpacket not in _IGNORED:
            outputs = [self._place(each) for each in _tensors(result)]
            self._steps.append((func, placed, [out if out.memory not in given else None for out in outputs]))
        return result

    def _memory_of(self, tensor, is_outside):
        storage = tensor.untyped_storage()
        _, memory = self._known.get(storage._cdata, (None, None))
        if memory is None or memory.is_over:
            memory = self._enclosing(storage)
            if memory is None:
                memory = _Memory(storage, is_outside)
                self._all.append(memory)
            self._known[storage._cdata] = StorageWeakRef(storage), memory
        return memory

    def _enclosing(self, storage):
        """The known memory that a storage is an alias of, or None: unsharded parameters have storages of their own."""
        begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        for memory in reversed(self._all):
            if begin < end and memory.begin <= begin and end <= memory.begin + memory.nbytes and memory.lives():
                return memory
        return None

    def _place(self, tensor):
        return _Place(tensor, self._memory_of(tensor, True))

    def resized(self, storage):
        """Note that a storage is about to be resized."""
        if storage._cdata in self._known:
            self._known.pop(storage._cdata)[1].is_over = True

    def undo(self):
        """Undo what the capture wrote, because a real one writes nothing."""
        for memory in self._all:
            memory.restore()

    def end(self):
        self.undo()
        for memory in self._all:
            memory.settle()
        self._known.clear()
        as_tensor = lambda place: place.tensor()  # noqa: E731
        self._steps = [
            (func, pytree.tree_map_only(_Place, as_tensor, given), [out and out.tensor() for out in outputs])
            for func, given, outputs in self._steps
        ]

    # ---- replaying

    def replay(self):
        with torch.no_grad():
            for func, (args, kwargs), outputs in self._steps:
                if func.namespace not in _COMMUNICATES:
                    self._wait()
                result = func(*args, **kwargs)
                if func.namespace == "_c10d_functional" and isinstance(result, torch.Tensor):
                    result = torch.ops._c10d_functional.wait_tensor(result)
                elif func.namespace in _COMMUNICATES:
                    self._works += [each for each in pytree.tree_leaves(result) if isinstance(each, torch.ScriptObject)]
                for output, value in zip(outputs, _tensors(result), strict=True):
                    if output is not None:
                        self._wait()
                        output.copy_(value)
            self._wait()

    def _wait(self):
        works, self._works = self._works, []
        for work in works:
            WAITING.wait(dist.distributed_c10d.Work.unbox(work))

    def __len__(self):
        return len(self._steps)

    def count(self, name):
        """How many collectives of this name a replay issues."""
        return sum(func.namespace in _COMMUNICATES and name in str(func) for func, _, _ in self._steps)


def _is_real(tensor):
    return type(tensor) in _PLAIN and tensor.device.type == "cpu"


def _tensors(tree):
    return [each for each in pytree.tree_leaves(tree) if isinstance(each, torch.Tensor)]


class Pool:
    """A memory pool. torch frees it with the last graph in it, and a failed capture breaks it."""

    def __init__(self):
        self.graphs = weakref.WeakSet()
        self.is_broken = False


class Captures:
    """Replaces the captures of CUDA in `composable_shard`."""

    def __init__(self):
        self._active = self._count = 0

    def number(self):
        return self._active

    def capture(self, work, pool):
        recording = Recording()
        assert pool is None or (len(pool.graphs) and not pool.is_broken), "torch fails: this pool cannot be used"
        pool = pool or Pool()
        self._count += 1
        self._active = self._count
        real = torch.UntypedStorage.resize_

        def resize_(storage, nbytes):
            recording.resized(storage)
            return real(storage, nbytes)

        torch.UntypedStorage.resize_ = resize_
        random = torch.get_rng_state()  # a real capture draws no numbers
        try:
            with recording:
                work()
        except BaseException:
            recording.undo()
            pool.is_broken = True
            raise
        finally:
            torch.UntypedStorage.resize_ = real
            self._active = 0
            torch.set_rng_state(random)
        recording.end()
        pool.graphs.add(recording)
        return recording, pool


@contextlib.contextmanager
def captures_on_cpu():
    """In this context, the library captures and replays on the CPU. Yields the `Captures`."""
    captures = Captures()
    with simulated(captures):
        yield captures
