"""The library's own process groups, on which its collectives never mix with those of other code on the same ranks.

gloo pairs collectives by their order alone. If one rank calls `full_tensor`, a barrier or a metric while another rank
gathers, gloo pairs the two calls, and a rank reads data that was sent for a different call. So on gloo the library
makes its own process group for each one that it is given. With NCCL, an additional communicator would take device
memory, so the library uses the given process group.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from .._torch.distributed import all_groups, backend_name, is_native, leave_to_parent, new_twin
from ..errors import PeerLostError

_of: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_twins: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_broken: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_of_parent: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
FORKED = (
    "process {} was forked from a training process and cannot use its connections: start processes before "
    "init_process_group, or with multiprocessing's 'spawn' method"
)
DESCRIPTION = "composable_shard"  # description of the process groups made here


class Meetings:
    """Hooks that keep a rank from waiting in `own_group` for ranks that will never call it (set by `_faults`)."""

    def __init__(self) -> None:
        self.expect: Callable[[dist.ProcessGroup, torch.device], None] = lambda group, device: None
        self.meet: Callable[[dist.ProcessGroup, torch.device], None] = lambda group, device: None

    def arrange_by(
        self,
        expect: Callable[[dist.ProcessGroup, torch.device], None],
        meet: Callable[[dist.ProcessGroup, torch.device], None],
    ) -> None:
        """From now on, call `expect` when an own group is announced and `meet` right before it is made."""
        self.expect, self.meet = expect, meet


MEETINGS = Meetings()


def expect_own_group(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Announce a later call of `own_group` for this group: peers are notified if this rank ends before that call."""
    if group is not None and _gets_own(group, device) and group not in _of and group not in _of_parent:
        MEETINGS.expect(group, device)


def _gets_own(group: dist.ProcessGroup, device: torch.device) -> bool:
    return group.size() > 1 and is_native(group) and backend_name(group, device) == "gloo"


def own_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Return the process group on which the library communicates among the ranks of `group`, for tensors on `device`.

    The first call for a gloo group blocks until the other ranks call it, as making any process group does.

    Raises:
        PeerLostError: this process was forked from one that has the group, and the connections belong to the parent;
            or another rank has failed or does not call this function.
    """
    if not _gets_own(group, device):
        return group
    if group in _of_parent:
        raise PeerLostError(FORKED.format(os.getpid()))
    made = _of.get(group)
    if made is None:
        MEETINGS.meet(group, device)
    if made is None or made in _broken:
        made = _of[group] = _twin(group, limit_of(group, device))
    return made


def next_number(group: dist.ProcessGroup | None) -> int:
    """Return one more than the last call for this process group; equal on ranks that call it equally often."""
    if group is None:
        return 0
    _counts[group] = _counts.get(group, 0) + 1
    return _counts[group]


def _twin(group: dist.ProcessGroup, limit: timedelta) -> dist.ProcessGroup:
    ranks = dist.get_process_group_ranks(group)
    if ranks != sorted(ranks):  # not all versions of torch can make a process group in this order
        return group
    _twins[group] = _twins.get(group, 0) + 1
    return new_twin(group, limit, _twins[group], DESCRIPTION)


def limit_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return the timeout of the collectives of a process group."""
    limit: timedelta = group._get_backend(device).options._timeout
    return limit


def note_broken(group: dist.ProcessGroup) -> None:
    """Mark one of our process groups as unusable; the next `own_group` makes another one."""
    _broken.add(group)


def _forked() -> None:
    """Handle a fork in the child process: it inherits the process groups, but none of the connections."""
    _of_parent.update(all_groups())
    leave_to_parent()


os.register_at_fork(after_in_child=_forked)
