"""The users' hooks on one sharded parameter, which are called with reduced gradients.

Autograd calls the hooks of a leaf when a gradient reaches the leaf. Here that is too early, because the gradient is not
reduced yet. So the hooks are removed from autograd before it can call them, and called with the reduced gradient. They
are restored after the backward, because in a compiled step autograd itself passes reduced gradients. Hooks on the
leaf's autograd node cannot be removed. Each is wrapped, and the wrapper ignores calls without a reduced gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from .._faults.ledger import IN_HOOK
from .._faults.watch import together
from .._torch.collective_mode import CollectiveMode
from .._torch.core import (
    HANDLES,
    Hook,
    any_gradient_hooks,
    carry_gradient_hooks,
    hooks_of_node,
    leaf_node,
    return_gradient_hooks,
    take_gradient_hooks,
)
from ..errors import ComposableShardError

# Attribute of an unsharded parameter that is a leaf: the id of the handle of our own hook on it.
WATCHED = "_watched_by"
# Collectives in hooks are compared across ranks (`_call`), but not in hooks that these packages define, for example for
# optimizers: these are registered on all ranks.
_SAME_ON_ALL = ("composable_shard.", "torch.distributed.")


class ParamHooks:
    """The hooks of one sharded parameter. The object is true while there are hooks to call with reduced gradients.

    Attributes:
        handles_seen: number of hook handles that torch had made for other code when the parameter was sharded; -1 if
            the parameter already had hooks.
    """

    __slots__ = ("_node", "_node_was_asked", "_on_accumulated", "_on_tensor", "handles_seen")

    def __init__(self) -> None:
        self._on_tensor: list[dict[int, Hook]] = []
        self._on_accumulated: list[dict[int, Hook]] = []
        self._node: _NodeHooks | None = None
        self._node_was_asked = False  # whether hooks on the node were looked for before (`_look_at_node`)
        self.handles_seen = HANDLES.of_others()

    def __bool__(self) -> bool:
        return any(self._on_tensor) or any(self._on_accumulated) or bool(self._node)

    @property
    def on_node(self) -> tuple[dict[int, Hook], dict[int, Hook]] | None:
        """The node's own dictionaries of hooks (before it, after it), which stay up to date; None without the node."""
        return None if self._node is None else (self._node.before, self._node.after)

    def carry(self, before: torch.Tensor, sharded: torch.Tensor) -> None:
        """Take over the hooks of the parameter from before sharding."""
        carry_gradient_hooks(before, sharded)
        may_have = HANDLES.of_others() > 0 and before.requires_grad and before.is_leaf  # each hook has a handle
        if may_have and (carried := _NodeHooks(before)):
            self._node = _NodeHooks(sharded)
            self._node.carry(carried)
        if self._node or any_gradient_hooks([sharded]):
            self.handles_seen = -1

    def take_over(self, leaf: torch.Tensor, sharded: torch.Tensor) -> None:
        """Move the hooks that users have registered on an unsharded copy, a leaf, to the sharded parameter."""
        self._hold(take_gradient_hooks(leaf, but=leaf.__dict__.get(WATCHED)))
        self.give_back(sharded)

    def take(self, sharded: torch.Tensor) -> bool:
        """Remove hooks that users have registered since the last call from autograd; returns whether any are held."""
        self._hold(take_gradient_hooks(sharded))
        self._look_at_node(sharded)
        if self._node:
            self._node.take()
        return bool(self._on_tensor or self._on_accumulated or self._node)

    def _hold(self, taken: tuple[dict[int, Hook] | None, dict[int, Hook] | None]) -> None:
        on_tensor, on_accumulated = taken
        if on_tensor is not None:
            self._on_tensor.append(on_tensor)
        if on_accumulated is not None:
            self._on_accumulated.append(on_accumulated)

    def _look_at_node(self, sharded: torch.Tensor) -> None:
        if self._node is not None and self._node.is_of(sharded):
            return
        self._node = _NodeHooks(sharded) if sharded.requires_grad else None
        # Most parameters never have hooks on their node. So if the first call finds none, it does not keep the node:
        # while the node lives, autograd visits its empty dictionaries. A later call means that hooks were registered
        # somewhere in the process. It keeps the node, so that `on_node` shows hooks that are added after it.
        if not self._node and not self._node_was_asked:
            self._node = None
        self._node_was_asked = True

    def give_back(self, sharded: torch.Tensor) -> bool:
        """Restore the hooks in autograd; returns whether any could not be restored."""
        left = return_gradient_hooks(sharded, self._on_tensor, self._on_accumulated)
        self._on_tensor, self._on_accumulated = left
        return any(left)

    def on_tensor(self, gradient: torch.Tensor, fqn: str) -> torch.Tensor:
        """Call the tensor hooks with a reduced gradient (a DTensor), and return the changed gradient.

        Errors of hooks get a note with the hook and the parameter's name `fqn`, also in `before` and `after`.
        """
        for hooks in self._on_tensor:
            for hook in tuple(hooks.values()):
                changed = _call(hook, fqn, gradient)
                gradient = gradient if changed is None else changed
        return gradient

    def before(self, gradient: torch.Tensor, fqn: str) -> torch.Tensor:
        """Call all hooks that run before a gradient is added to `.grad`, and return the gradient as they changed it."""
        gradient = self.on_tensor(gradient, fqn)
        if self._node:
            (gradient,) = _call_before(self._node.before, (gradient,), fqn)
        return gradient

    def after(self, sharded: torch.Tensor, gradient: torch.Tensor, fqn: str) -> None:
        """Call the hooks that run after the gradient was added to `.grad`."""
        for hooks in self._on_accumulated:
            for hook in tuple(hooks.values()):
                _call(hook, fqn, sharded)
        if self._node:
            _call_after(self._node.after, (), (gradient,), fqn=fqn)


class _NodeHooks:
    """The hooks on the autograd node of one leaf; optimizers that step in backward use such hooks.

    Attributes:
        before, after: the node's own dictionaries of hooks, so that users' handles can remove them at any time.
    """

    def __init__(self, leaf: torch.Tensor) -> None:
        self._node = leaf_node(leaf)  # held here, because the leaf does not hold it: it would be freed with its hooks
        self.before, self.after = hooks_of_node(self._node)

    def __bool__(self) -> bool:
        return bool(self.before or self.after)

    def take(self) -> None:
        """Wrap the hooks, so that they are called with reduced gradients only."""
        for hooks in (self.before, self.after):
            for key, hook in hooks.items():
                if not isinstance(hook, _AfterReduction):
                    hooks[key] = _AfterReduction(hook)

    def is_of(self, leaf: torch.Tensor) -> bool:
        """Whether the node is still the leaf's; converting the module (`.to`) gives the leaf another node."""
        return self._node.variable is leaf

    def carry(self, others: _NodeHooks) -> None:
        """Call the hooks of another node, too; users' handles can still remove them."""
        if others.before:
            self._node.register_prehook(partial(_call_before, others.before))
        if others.after:
            self._node.register_hook(partial(_call_after, others.after))


class _AfterReduction:
    """A user's hook on the autograd node of a sharded parameter, to be called with reduced gradients only.

    In an eager backward, autograd runs the node with None before the gradient is reduced. That call is ignored. In a
    compiled step, autograd passes a gradient that is already reduced.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __call__(self, *gradients: Sequence[torch.Tensor | None]) -> Any:
        return None if all(each is None for each in gradients[-1]) else self.hook(*gradients)


def _call(hook: Callable[..., Any], fqn: str, *args: Any) -> Any:
    """Call a user's hook on a parameter; an error gets a note with both names. `fqn` is empty if torch calls it.

    Collectives in the hook are compared across ranks before they are issued. A hook that only some ranks have would
    otherwise wait forever, in a process group that the library cannot close.
    """
    if not fqn:
        return hook(*args)
    try:
        if all((getattr(each, "__module__", None) or "").startswith(_SAME_ON_ALL) for each in _hooks_in(hook)):
            return hook(*args)
        with CollectiveMode(partial(_note_collective, fqn)):
            return hook(*args)
    except Exception as error:
        advice = (
            ". The gradient of a sharded parameter is a DTensor: compute with other DTensors, or with its to_local(), "
            "which is this rank's shard"
        )
        titles = ", ".join(map(_title_of, _hooks_in(hook)))
        known = isinstance(error, ComposableShardError)
        error.add_note(f"raised by the hook {titles} on parameter {fqn}{'' if known else advice}")
        raise


def _note_collective(fqn: str, name: str, ranks: Sequence[int]) -> None:
    # The note names the parameter. Otherwise ranks whose hooks on different parameters run the same collective would
    # combine unrelated values without an error.
    together(f"run {name}{IN_HOOK}{fqn}", ranks)


def _hooks_in(hook: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield the users' hooks that one hook calls: itself, if it is not ours."""
    if isinstance(hook, _AfterReduction):
        yield from _hooks_in(hook.hook)
    elif isinstance(hook, partial) and hook.func in (_call_before, _call_after):  # see `_NodeHooks.carry`
        for each in hook.args[0].values():
            yield from _hooks_in(each)
    else:
        yield hook


def _title_of(hook: Callable[..., Any]) -> str:
    """Return the name of a user's hook and where it is defined."""
    if isinstance(hook, partial):
        return _title_of(hook.func)
    code = getattr(hook, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return f"{getattr(hook, '__qualname__', type(hook).__qualname__)}{where}"


def _call_before(
    hooks: Mapping[int, Callable[..., Any]], gradients: tuple[torch.Tensor, ...], fqn: str = ""
) -> tuple[torch.Tensor, ...]:
    for hook in tuple(hooks.values()):
        changed = _call(hook, fqn, gradients)
        if changed is not None:
            gradients = changed if isinstance(changed, tuple) else (changed,)
    return gradients


def _call_after(hooks: Mapping[int, Callable[..., Any]], *gradients: tuple[torch.Tensor, ...], fqn: str = "") -> None:
    for hook in tuple(hooks.values()):
        _call(hook, fqn, *gradients)
