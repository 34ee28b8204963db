"""Process groups of the library's own: its collectives never meet those that others issue among the same ranks.

gloo pairs collectives by their order alone. A `full_tensor`, a barrier or a metric on one rank would be paired with a
gather on another one, and one of them would read what was sent for the other. So on gloo the library communicates on a
process group of its own for each one that it is given. NCCL's communicators hold memory of the device; there, the
library uses what it is given.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from .._errors import PeerLostError
from .._torch.distributed import all_groups, backend_name, is_native, leave_to_parent, new_twin

_of: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_twins: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_broken: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_of_parent: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
FORKED = (
    "process {} was forked from one that trains, and cannot communicate for it: start processes before "
    "init_process_group, or by multiprocessing's 'spawn'"
)
DESCRIPTION = "composable_shard"  # of the process groups that are made here


class Meetings:
    """What is done so that no rank makes a process group of ours while others never come to do so (`_faults`)."""

    def __init__(self) -> None:
        self.expect: Callable[[dist.ProcessGroup, torch.device], None] = lambda group, device: None
        self.meet: Callable[[dist.ProcessGroup, torch.device], None] = lambda group, device: None

    def arrange_by(
        self,
        expect: Callable[[dist.ProcessGroup, torch.device], None],
        meet: Callable[[dist.ProcessGroup, torch.device], None],
    ) -> None:
        """From now on, call `expect` for groups for which one is going to be made, and `meet` before that."""
        self.expect, self.meet = expect, meet


MEETINGS = Meetings()


def expect_own_group(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """`own_group` will be called for this group: if this rank ends before it comes to do so, the others are told."""
    if group is not None and _gets_own(group, device) and group not in _of and group not in _of_parent:
        MEETINGS.expect(group, device)


def _gets_own(group: dist.ProcessGroup, device: torch.device) -> bool:
    return group.size() > 1 and is_native(group) and backend_name(group, device) == "gloo"


def own_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """The process group on which the library communicates among the ranks of `group`, for tensors on `device`.

    The first call for a group on gloo waits for its other ranks, as the making of a process group does.

    Raises:
        PeerLostError: this process was forked from one that has the group, whose connections are its parent's; or
            another rank has failed, or does not come.
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
    """One more than the last call for this process group gave: equal on ranks that call it equally often."""
    if group is None:
        return 0
    _counts[group] = _counts.get(group, 0) + 1
    return _counts[group]


def _twin(group: dist.ProcessGroup, limit: timedelta) -> dist.ProcessGroup:
    ranks = dist.get_process_group_ranks(group)
    if ranks != sorted(ranks):  # not all versions of torch can make one in this order
        return group
    _twins[group] = _twins.get(group, 0) + 1
    return new_twin(group, limit, _twins[group], DESCRIPTION)


def limit_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long a collective of a process group may take."""
    limit: timedelta = group._get_backend(device).options._timeout
    return limit


def note_broken(group: dist.ProcessGroup) -> None:
    """A process group of ours is of no use any more; whoever asks for it next gets another one."""
    _broken.add(group)


def _forked() -> None:
    """This is a child process: it has its parent's process groups, but none of the connections."""
    _of_parent.update(all_groups())
    leave_to_parent()


os.register_at_fork(after_in_child=_forked)
