"""The bucket of parameters that define their own all-gather, in eager steps (see `extension.py`).

The unsharded tensor stays one object, as such subclasses expect: a leaf Parameter, which is installed where there is no
node. Its memory does not belong to the pool: it consists of the gathered `outputs` and the tensors `owned` that the
shard returns with the tensor. Resharding empties the storages of both. All other memory that the tensor refers to
belongs to the shard and stays.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from .._comm.copies import GatherCopies
from .._comm.lanes import Job
from .._memory.slots import Outside
from .._plan.layout import gather_layout
from .._policies import MixedPrecisionPolicy
from .._torch.core import plain_parts, storage_id
from .._torch.distributed import local_tensor
from .bucket import OUTPUT_OF, Bucket, Gatherer
from .extension import Extension, gathered_shapes
from .faces import LEAF_OF, Leaves
from .param import ShardedParam
from .setup import GatherSetup


class _Memory:
    """The memory of some tensors, which is freed and allocated again while the tensors stay.

    Attributes:
        storages: the storages of the tensors, by id.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self.storages = {storage_id(tensor): tensor.untyped_storage() for tensor in tensors}
        self._nbytes = {key: storage.nbytes() for key, storage in self.storages.items()}

    def allocate(self) -> None:
        for key, storage in self.storages.items():
            if storage.nbytes() != self._nbytes[key]:
                storage.resize_(self._nbytes[key])

    def free(self) -> None:
        for storage in self.storages.values():
            storage.resize_(0)


class _Extended:
    """One parameter that defines its own all-gather.

    Attributes:
        extension: its methods.
        leaf: the unsharded parameter, like that of torch's FSDP2; None before the first gather.
        inputs: the tensors that this rank sends.
        outputs: for each input, the flat tensor into which the inputs of all ranks are gathered.
    """

    def __init__(self, extension: Extension) -> None:
        self.extension = extension
        self.leaf: nn.Parameter | None = None
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        self._metadata: Any = None
        self._shapes: list[tuple[int, ...]] = []
        self._arriving = _Memory()  # the memory of the outputs
        self._handed_over = _Memory()  # the memory of the tensors that `fsdp_post_all_gather` returned as owned

    def ask(self) -> bool:
        """Get the inputs from the shard and allocate the outputs.

        Returns:
            whether there is a leaf that must be made again, because sizes or dtypes have changed since the last gather.
        """
        info = self.extension.info
        self.inputs, self._metadata = self.extension.call_pre()
        self._shapes = gathered_shapes(self.inputs, info.shard_size)
        kinds = [(tensor.numel() * info.shard_size, tensor.dtype) for tensor in self.inputs]
        before = self.leaf
        if kinds != [(output.numel(), output.dtype) for output in self.outputs]:
            self._arriving.free()
            self._handed_over.free()
            self.outputs = [torch.empty(numel, dtype=dtype, device=info.device) for numel, dtype in kinds]
            self._arriving = _Memory(self.outputs)
            self.leaf = None
        self._arriving.allocate()
        return before is not None and self.leaf is None

    def take(self) -> dict[int, torch.UntypedStorage]:
        """Make the unsharded parameter from the outputs; returns the storages that `free` will empty, by id."""
        outputs = tuple(output.view(shape) for output, shape in zip(self.outputs, self._shapes, strict=True))
        if self.leaf is None:
            made, owned = self.extension.call_post(outputs, self._metadata)
            self._handed_over = _Memory(owned)
            self.leaf = self._leaf(made)
        else:
            self._handed_over.allocate()
            self.extension.refill(self.leaf, outputs, self._metadata)
        self.inputs, self._metadata = [], None
        parts = plain_parts(self.leaf)
        # Parts of other classes may refer to memory that is not visible here. Then the outputs are kept.
        if all(map(_is_plain, parts)) and self._arriving.storages.keys().isdisjoint(map(storage_id, parts)):
            self._arriving.free()  # no part of the parameter is in the outputs
            return self._handed_over.storages
        return self._handed_over.storages | self._arriving.storages

    def parts_in(self, storages: Container[int]) -> list[torch.Tensor]:
        """The tensors inside of the leaf that `free` will empty. Autograd may have saved others, for example scales."""
        parts = [] if self.leaf is None else plain_parts(self.leaf)
        return [part for part in parts if not _is_plain(part) or storage_id(part) in storages]

    def _leaf(self, made: torch.Tensor) -> nn.Parameter:
        param = self.extension.param
        leaf = nn.Parameter(made if param.parallel is None else param.parallel.around(made), requires_grad=False)
        leaf.__dict__[LEAF_OF] = param.fqn
        return leaf

    @property
    def tensor(self) -> torch.Tensor:
        """The unsharded parameter, or its local tensor if it was a DTensor."""
        assert self.leaf is not None
        return self.leaf if self.extension.param.parallel is None else local_tensor(self.leaf)

    def free(self) -> None:
        """Empty the storages of the unsharded parameter."""
        self._arriving.free()
        self._handed_over.free()
        self.inputs = []

    def abandon(self) -> list[torch.Tensor]:
        """Use new memory from the next gather on; returns the memory of the gather that is abandoned."""
        abandoned = [*self.inputs, *self.outputs]
        self.inputs, self.outputs, self.leaf = [], [], None
        self._arriving, self._handed_over = _Memory(), _Memory()
        return abandoned


class ExtensionBucket(Bucket):
    """The parameters of a group that define their own all-gather. One collective gathers all of their bytes.

    Attributes:
        extensions: their methods.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        dtype: torch.dtype,
        setup: GatherSetup,
        policy: MixedPrecisionPolicy,
    ) -> None:
        super().__init__(params, dtype, setup.group)
        self.extensions = [Extension(param, dtype, setup.info, policy) for param in params]
        self._members = list(map(_Extended, self.extensions))
        self._info, self._transport = setup.info, setup.transport
        self._pool, self._lane = setup.pool, setup.lane
        self._gatherers: dict[tuple[int, ...], Gatherer] = {}  # by the sizes of the inputs in bytes
        self._claims: list[Outside] = []
        self._abandoned: list[torch.Tensor] = []  # interrupted gathers may still use these; held as long as the bucket

    @property
    def weights(self) -> list[torch.Tensor]:
        return [member.tensor for member in self._members]

    def whole(self, index: int) -> torch.Tensor:
        leaf = self._members[index].leaf
        assert leaf is not None
        return leaf

    def begin_forward(self, outputs: Sequence[torch.Tensor]) -> None:
        super().begin_forward(outputs)
        own = weakref.ref(self)
        for index, output in enumerate(outputs):
            output.__dict__[OUTPUT_OF] = own, index

    def start(self, after: torch.Event | None) -> Job[None]:
        if after is not None:  # `ask` reads the parameters on the current stream
            after.wait()
        self.note_shards([param.local for param in self.params])
        with torch.inference_mode(False), torch.no_grad():
            if any([member.ask() for member in self._members]):  # noqa: C419 - all of them
                self.expire_handles()  # they hold views of the former outputs, which are freed
        inputs = [bytes_of(tensor) for member in self._members for tensor in member.inputs]
        outputs = [bytes_of(tensor) for member in self._members for tensor in member.outputs]
        return self.gather(inputs, outputs)

    def gather(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> Job[None]:
        """Begin to gather tensors of bytes.

        The gather waits for the current stream, on which the inputs were computed and the outputs allocated.
        """
        gatherer = self._gatherer_of(tuple([tensor.numel() for tensor in inputs]))
        return gatherer.start_into(gatherer.copies.into(outputs), inputs, (self._lane.record_current_stream(),))

    def _gatherer_of(self, sizes: tuple[int, ...]) -> Gatherer:
        """Return the gatherer of inputs with these sizes in bytes; only the last one is kept."""
        if sizes not in self._gatherers:
            info, route = self._info, None if self._transport is None else self._transport.route
            shapes = [(info.shard_size * size,) for size in sizes]
            layout = gather_layout(shapes, info.shard_size, 1, [0] * len(sizes), route)
            copies = GatherCopies(layout, info.shard_rank, self._transport)
            landing = self._pool.request(f"landing {self.fqns[0]}", layout.landing_bytes)
            landings = None if layout.landing is None else (landing, landing)
            self._gatherers = {sizes: Gatherer(copies, torch.uint8, landings, self._pool, self._lane)}
        return self._gatherers[sizes]

    def leave_slots(self) -> None:
        for gatherer in self._gatherers.values():
            gatherer.leave_slots()

    def arrived(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            taken = [(index, member.take()) for index, member in enumerate(self._members)]
        by_id = {key: (storage, index) for index, storages in taken for key, storage in storages.items()}
        self._claims = [Outside(storage, self, index) for storage, index in by_id.values()]
        self._pool.register(self._claims)
        freed = [part for member in self._members for part in member.parts_in(by_id)]
        leaves = [member.leaf for member in self._members if member.leaf is not None]
        self.replace_leaves(Leaves(leaves, in_memory=freed))
        super().arrived()

    def release(self, after: torch.Event | None, reserve: bool = False) -> None:
        # `after` is not needed: torch has allocated the memory on the current stream, which also reads it, and reuses
        # it there. The lane has written it, but the current stream has waited for that.
        leaves = self.replace_leaves(None)
        super().lose()  # only marks the parameters as unreadable: the members own the memory
        self.writes.end_reads()
        if leaves is not None:
            leaves.give_up()
        self._pool.unregister(self._claims)
        self._claims = []
        for member in self._members if not reserve else ():  # the next gather writes into the same storages
            member.free()

    def lose(self) -> None:
        for member in self._members:
            self._abandoned += member.abandon()
        self.expire_handles()  # they hold views of the outputs, which the abandoned gather may still use
        self.release(None)

    def forget(self) -> None:
        for member in self._members:
            member.free()


def _is_plain(part: torch.Tensor) -> bool:
    return type(part) in (torch.Tensor, nn.Parameter)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as a 1D tensor of bytes."""
    return tensor.view(-1).view(torch.uint8)
