"""The connection over which ranks of a process group send weights. Its faults do not concern training."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from .._comm.lanes import WAITING, Awaitable
from .._comm.mesh import compute_device, default_device_type
from .._faults.ledger import TransferLedger
from .._faults.watch import WATCHER
from .._plan.boxes import Box
from .._torch.distributed import backend_name, is_native, join_group, new_twin, owns_connections
from ..errors import (
    PeerLostError,
    RankMismatchError,
    ShardConfigStateError,
    ShardConfigUnsupportedError,
    ShardConfigValueError,
)
from ._course import Course
from ._plan import Identity, Plan

T = TypeVar("T")
Place = tuple[StorageWeakRef, int, object]  # a tensor's storage, its offset in it, and the version counter

_TAG = 0x5E7D  # of all messages; those of a pair of ranks arrive in order
_DESCRIPTION = "composable_shard weights"
_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, Channel] = weakref.WeakKeyDictionary()


class Progress:
    """What a rank knows about the updates of one plan.

    Attributes:
        version: version of the last weights that all receivers have; -1 if there are none.
        prints: fingerprints of the parts that this rank has sent in that version; empty if there are none.
        places: memory of this rank's tensors that have that version. Weak references, because another tensor may get
            the same address later.
    """

    def __init__(self) -> None:
        self._courses: dict[int, Course] = {}
        self.version = -1
        self.prints: dict[tuple[str, Box], bytes] = {}
        self.places: list[Place] = []

    def course(self, plan: Plan, rank: int, most: int) -> Course:
        """The messages of this rank. They are computed once for each limit."""
        if most not in self._courses:
            self._courses[most] = Course(plan, rank, most)
        return self._courses[most]

    def forget_places(self) -> None:
        """Let this rank's tensors count as changed by other code."""
        self.places = []

    def switched(self, version: int, prints: dict[tuple[str, Box], bytes], places: list[Place]) -> None:
        """All receivers have a new version."""
        self.version, self.prints, self.places = version, prints, places


class Channel:
    """A process group for weights alone, with a ledger that is compared before anything is sent.

    Args:
        group: the user's process group of all senders and receivers.

    Attributes:
        ledger: ledger of the own group.
        device: compute device of this rank.
        wire: device of tensors that are sent.
        ranks: all ranks: global ranks, or for a group of `connect` those of the group.
        rank: this rank.
        updates: number of updates so far.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        if not is_native(group):
            raise ShardConfigUnsupportedError(
                f"group: is a {type(group).__name__}, over which weights cannot be sent; use a process group of torch "
                "(testing.spmd simulates ranks: test with processes instead)"
            )
        kind = default_device_type()
        self.device = compute_device(kind) if _has_backend(group, compute_device(kind)) else torch.device("cpu")
        limit = group._get_backend(self.device).options._timeout
        own = group
        if not owns_connections(group):
            first = TransferLedger(group, self.device)
            with WATCHER.watching(first):  # otherwise, torch would wait for a rank that has failed until a timeout
                first.issue("send or receive weights for the first time")
            own = new_twin(group, limit, 1, _DESCRIPTION, backend_name(group, self.device))
        self.wire = torch.device("cpu") if backend_name(own, self.device) == "gloo" else self.device
        self._group = own
        self.ledger = TransferLedger(own, self.device)
        WATCHER.add(self.ledger)
        self.ranks = self.ledger.ranks
        self.rank = self.ranks[self.ledger.rank]
        self._index = {rank: index for index, rank in enumerate(self.ranks)}
        self._progress: weakref.WeakKeyDictionary[Identity, Progress] = weakref.WeakKeyDictionary()
        self.updates = 0

    def progress(self, plan: Plan) -> Progress:
        """The progress of the updates of a plan."""
        return self._progress.setdefault(plan.identity, Progress())

    def count_update(self) -> None:
        """Count an update that all ranks have finished."""
        self.updates += 1
        self.ledger.forget_old()

    def synchronize(self) -> None:
        """Wait until queued work of this thread's stream has ended."""
        if self.device.type != "cpu":
            torch.accelerator.current_stream(self.device).synchronize()

    def agree(self, what: str) -> None:
        """Wait until all ranks are about to do the same.

        Raises:
            RankMismatchError: a rank is about to do something else. Raised on all ranks.
            PeerLostError: a rank is lost, or has failed. Raised on all others.
        """
        self.ledger.issue(what)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of the ranks."""
        values: list[Any] = [None] * self.ledger.world
        with WAITING.for_ranks():
            self._explained(lambda: dist.all_gather_object(values, value, group=self._group))
        return values

    def together(self, what: str, prepare: Callable[[], T], unless: str = "Nothing was sent") -> list[T]:
        """Prepare something on every rank, and return all results in the order of the ranks.

        If this fails on a rank, it fails on all. The channel can still be used then.

        Args:
            what: what the ranks are about to do.
            prepare: called on this rank.
            unless: what is true if it fails; the end of the error on other ranks.

        Raises:
            RankMismatchError: `prepare` has failed on another rank, or ranks are about to do different things.
            PeerLostError: another rank is lost.
        """
        own, failure = None, None
        with self.failures_told():
            try:
                own = prepare()
            except Exception as error:
                failure = error
            self.agree(what)
            said = self.gather((own, "" if failure is None else f"{type(failure).__name__}: {failure}"))
        if failure is not None:
            raise failure
        for rank, (_, text) in zip(self.ranks, said, strict=True):
            if text:
                raise RankMismatchError(f"rank {rank} cannot {what.partition(',')[0]}: {text}. {unless}")
        return [each for each, _ in said if each is not None]

    def compare(self, settings: Sequence[str]) -> None:
        """Check that all ranks have the same settings.

        Raises:
            RankMismatchError: they differ.
        """
        for rank, each in zip(self.ranks, settings, strict=True):
            if each != settings[0]:
                raise RankMismatchError(
                    f"rank {self.ranks[0]} has {settings[0]}, and rank {rank} has {each}; pass the same plan and limit "
                    "on all ranks. Nothing was sent"
                )

    def send(self, data: torch.Tensor, target: int) -> Awaitable:
        """Send bytes to a rank."""
        return self._explained(lambda: self._group.send([data], self._index[target], _TAG))

    def receive(self, data: torch.Tensor, source: int) -> Awaitable:
        """Receive bytes from a rank."""
        return self._explained(lambda: self._group.recv([data], self._index[source], _TAG))

    def wait(self, handle: Awaitable) -> None:
        """Wait for a message.

        Raises:
            PeerLostError: a rank is lost.
        """
        with WAITING.for_ranks():
            self._explained(handle.wait)

    def _explained(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:
            if (why := WATCHER.explain_transfer(self.ledger, error)) is not error:
                raise why from error
            raise

    @contextmanager
    def failures_told(self) -> Iterator[None]:
        """If this rank fails in this context, tell the others, so that they do not wait for it."""
        try:
            yield
        except BaseException as error:
            if self.ledger.fault is None:
                text = f"rank {self.rank} has failed while weights were sent: {type(error).__name__}: {error}"
                with suppress(Exception):  # the store may be lost, too
                    self.ledger.poison(PeerLostError, text[:2000])
            raise


def _has_backend(group: dist.ProcessGroup, device: torch.device) -> bool:
    try:
        group._get_backend(device)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def channel_of(group: dist.ProcessGroup | None) -> Channel:
    """The channel of a process group. All ranks of the group must call this the first time.

    Raises:
        PeerLostError: a rank was lost, or has failed. Make another process group.
        ShardConfigStateError: there is no process group.
    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ShardConfigStateError("group: there is no process group; call init_process_group or weights.connect")
    if not isinstance(group, dist.ProcessGroup):
        raise ShardConfigStateError("group: this rank is not in the process group; only its ranks send or receive")
    channel = _channels.get(group)
    if channel is not None and (fault := channel.ledger.fault) is not None:
        raise PeerLostError(f"weights can no longer be sent in this process group: {fault.text}")
    if channel is None:
        channel = _channels[group] = Channel(group)
    return channel


def connect(
    init_method: str,
    rank: int,
    world_size: int,
    *,
    backend: str | None = None,
    timeout: timedelta = timedelta(minutes=5),
) -> dist.ProcessGroup:
    """Make a process group of trainers and inference engines that are separate jobs.

    It does not become the default process group, so each job keeps its own.

    Args:
        init_method: address at which the processes connect, such as ``tcp://host:29600``. Rank 0 listens there, on the
            host that the address names. Use another port for each group.
        rank: rank of this process, from 0 to `world_size` - 1. Number the trainers first, in the order of their ranks:
            then the ranks in ``layout(model)`` are those of this group.
        world_size: number of trainers and receivers.
        backend: backend, such as "gloo" or "nccl". Default: gloo for tensors on the CPU, torch's default for others.
        timeout: maximum time for which ranks wait for each other.

    Returns:
        The process group, for `send`, `receive` and `plan_together`.

    Raises:
        ShardConfigValueError: `rank` is not between 0 and `world_size` - 1.
        PeerLostError: not all ranks have connected within the timeout.
    """
    if not 0 <= rank < world_size:
        raise ShardConfigValueError(f"rank: {rank} is not a rank of {world_size} processes; pass 0 to {world_size - 1}")
    try:
        return join_group(init_method, rank, world_size, backend, timeout, _DESCRIPTION)
    except RuntimeError as error:
        raise PeerLostError(
            f"connect: {world_size} ranks did not meet at {init_method} within {timeout.total_seconds():.0f} s: "
            f"{error} Pass the same address and world_size on all ranks, and a different rank on each. If a rank is "
            "only slow, use a longer timeout"
        ) from error
