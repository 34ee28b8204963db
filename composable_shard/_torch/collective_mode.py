"""A dispatch mode that sees the collectives of the code that runs in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from .distributed import exists

_resolve: Callable[[str], dist.ProcessGroup] = getattr(dist.distributed_c10d, "_resolve_process_group")  # noqa: B009
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
# Operators of these namespaces that not all ranks of the group run.
_NOT_OF_ALL = ("wait_tensor", "monitored_barrier_", "send", "recv_", "recv_any_source_")


class CollectiveMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls a function with the name and the ranks of each collective before it is issued, also those of DTensors.

    Collectives of process groups that torch does not know, because they were made without it, are left out.

    Args:
        tell: the function; if it raises, the collective is not issued.
    """

    supports_higher_order_operators = True

    def __init__(self, tell: Callable[[str, Sequence[int]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell = tell

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled functions keep running as compiled code in this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the DTensor runs first, and its collectives come here
        if (
            getattr(func, "namespace", "") in _NAMESPACES
            and (name := func._schema.name.partition("::")[2]) not in _NOT_OF_ALL
        ):
            for group in _groups([*args, *(kwargs or {}).values()]):
                if exists(group):
                    self._tell(name.strip("_"), dist.get_process_group_ranks(group))
        return func(*args, **(kwargs or {}))


def _groups(arguments: Sequence[Any]) -> Iterator[dist.ProcessGroup]:
    """The process group among the arguments of a collective: an object, or the last string, its name."""
    for each in arguments:
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            yield dist.ProcessGroup.unbox(each)
            return
    names = [each for each in arguments if isinstance(each, str)]
    if names:
        yield _resolve(names[-1])
