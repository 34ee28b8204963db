"""`LazyZeros`: a `.grad` of zeros that takes memory only when code uses its values, and notices `zero_grad`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

# What `zero_grad(set_to_none=False)` calls.
_CLEARS = torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default


class LazyZeros(torch.Tensor):
    """A tensor of -0.0. Operators run on `content`, which the first one makes.

    Args:
        shape, dtype, device: of the tensor.

    Attributes:
        content: the values in memory; None before an operator needs them.
        is_cleared: whether the tensor was set to zero. Until other operators run, it then contains 0.0.
    """

    content: torch.Tensor | None
    is_cleared: bool

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> LazyZeros:
        made: LazyZeros = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.reset()
        return made

    @property
    def is_untouched(self) -> bool:
        """Whether no operator has used the tensor."""
        return self.content is None and not self.is_cleared

    def reset(self) -> None:
        """Return to the first state."""
        self.content, self.is_cleared = None, False

    def dense(self) -> torch.Tensor:
        """Return the values."""
        if self.content is None:
            zero = 0.0 if self.is_cleared else -0.0  # adding to -0.0 changes no bit of a sum
            self.content = torch.full(self.shape, zero, dtype=self.dtype, device=self.device)
        return self.content

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _CLEARS:
            tensors = [args[0]] if isinstance(args[0], torch.Tensor) else args[0]
            for each in tensors:
                if isinstance(each, cls):
                    each.is_cleared = True
            contents = [each.content if isinstance(each, cls) else each for each in tensors]
            if in_memory := [each for each in contents if each is not None]:
                torch._foreach_zero_(in_memory)
            return args[0] if isinstance(args[0], torch.Tensor) else None
        lazies: dict[int, LazyZeros] = {}

        def replace(lazy: LazyZeros) -> torch.Tensor:
            lazies[id(lazy.dense())] = lazy
            return lazy.dense()

        made = func(*tree_map_only(cls, replace, args), **tree_map_only(cls, replace, kwargs))
        # An operator in place returns its argument.
        return tree_map_only(torch.Tensor, lambda each: lazies.get(id(each), each), made)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyZeros({self.dense()!r})"
