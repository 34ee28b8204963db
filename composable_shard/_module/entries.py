"""Install a group's sharded or unsharded parameters in the `_parameters` entries of modules."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, is_, setitem
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._group.extension import is_extended
from .._group.faces import LEAF_OF
from .._group.param import ShardedParam, run_all
from .._torch.core import DELETES_ATTRIBUTES, HANDLES, address_of, without_torch_function
from .._torch.distributed import local_tensor
from ..errors import ShardConfigStateError

_setitem: Callable[[dict[str, Any], str, Any], None] = setitem
_requires_grad = attrgetter("requires_grad")
_storage = torch.Tensor.untyped_storage

Place = tuple[dict[str, nn.Parameter | None], str, int]  # a module's `_parameters`, a name there, and the index


class _Columns(NamedTuple):
    """All places as columns, because every forward maps functions over them; `indices` is None for 0, 1, 2, ..."""

    dicts: list[dict[str, nn.Parameter | None]]
    names: list[str]
    indices: list[int] | None

    @classmethod
    def of(cls, places: Sequence[Place]) -> _Columns:
        indices = [index for _, _, index in places]
        untied = indices == list(range(len(indices)))
        return cls([names for names, _, _ in places], [name for _, name, _ in places], None if untied else indices)


class ModuleEntries:
    """All entries of modules' `_parameters` that hold a group's parameters, sharded or unsharded.

    This object refers to the dictionaries, never to the modules, so that a module is not kept alive by its own state.

    Args:
        places: the entries. A tied parameter has several.
        params: the sharded parameters, tied ones once.

    Attributes:
        places, params: as given; `places` is updated when users move or tie parameters.
        are_replaced: whether tensors other than the sharded parameters are installed: unsharded ones, copies or pieces.
        converted: whether the next `adopt` must report a change even if it finds none, because `Module._apply` has
            converted parameters, or Dynamo has traced a change.
    """

    def __init__(self, places: Sequence[Place], params: Sequence[ShardedParam]) -> None:
        self.params = params
        self._modules: Mapping[int, weakref.ref[nn.Module]] = {}  # by id of their `_parameters`
        # The entries that Dynamo sees, and those in whose place traced code sets attributes of the modules.
        self._traced: Sequence[Place] = ()
        self._apart: Sequence[tuple[weakref.ref[nn.Module], str, int]] = ()
        self._set_places(places)
        self.are_replaced = False
        self.converted = False
        self._shards = [param.sharded for param in params]
        self._installed: Sequence[torch.Tensor] = self._shards
        # `requires_grad` of the installed tensors, if these are leaves, which users may freeze; else empty.
        self._leaf_flags: list[bool] = []
        self._handles_seen = 0  # number of hook handles when the leaves were installed
        self._assigned: list[tuple[dict[str, Any], str, Any]] = []  # see `note_assigned`
        self._recurrent: list[weakref.ref[nn.Module]] = []
        self._has_warned = False
        # By index, the parameter that was replaced last, to recognize it if it is assigned again.
        self._before: dict[int, weakref.ref[nn.Parameter]] = {}
        # For the sharded parameters at the last check: the storage of each DTensor, and its local tensor.
        self._storages: list[Any] = []
        self._pieces: list[weakref.ref[torch.Tensor]] = []
        self._check_data()

    def __getstate__(self) -> dict[str, Any]:
        # These refer to modules and tensors of the original. The copy's engine and `_check_data` set its own.
        own: dict[str, Any] = {
            "_modules": {},
            "_apart": [],
            "_recurrent": [],
            "_storages": [],
            "_pieces": [],
            "_before": {},
        }
        return self.__dict__ | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._check_data()

    def follow_in_rnns(self, recurrent: Sequence[nn.Module]) -> None:
        """Note which of these RNNs have our parameters: their `_flat_weights` lists must follow the entries."""
        ours = {id(names) for names in self._columns.dicts} if recurrent else ()
        of_ours = [module for module in recurrent if id(module._parameters) in ours]
        self._recurrent = [
            weakref.ref(module)
            for module in of_ours
            if module._parameters.keys() >= {*vars(module)["_flat_weights_names"]}
        ]

    def know_modules(self, modules: Mapping[int, weakref.ref[nn.Module]]) -> None:
        """Receive the modules, by id of their `_parameters`."""
        self._modules = modules
        self._set_places(self.places)

    def name_modules(self, names: Mapping[int, str]) -> None:
        """Receive the modules' names in the root, by id of their `_parameters`. This class does not use them."""

    def follow(self) -> None:
        """Do the work of `adopt` while Dynamo traces.

        If parameters were replaced, set `converted`, so that `adopt` reports this to the engine in the next eager
        forward.
        """
        if self.are_replaced:
            return
        places = self._traced if torch.compiler.is_compiling() else self.places
        if any([names.get(name) is not self._shards[index] for names, name, index in places]):  # noqa: C419
            self.adopt()
            self.converted = True

    def install(self, tensors: Sequence[torch.Tensor], traced: bool = False) -> None:
        """Install these tensors; with `traced`, in a loop that Dynamo can trace."""
        if self._leaf_flags and not traced:
            self.adopt_changes()
            self._leaf_flags = []
        self.are_replaced = True
        self._installed = tensors
        if traced:
            for names, name, index in self._traced:
                names[name] = tensors[index]  # type: ignore[assignment]
            for known, name, index in self._apart:
                known().__dict__[name] = tensors[index]
        else:
            dicts, names_in, indices = self._columns
            run_all(map(_setitem, dicts, names_in, tensors if indices is None else [tensors[i] for i in indices]))
        for known in self._recurrent:
            if (module := known()) is not None:
                list_anew(module)

    def install_leaves(self, leaves: Sequence[torch.Tensor]) -> None:
        """Install leaves, which users may freeze, unfreeze or hook instead of the sharded parameters."""
        self.install(leaves)
        self._leaf_flags = list(map(_requires_grad, leaves))
        self._handles_seen = HANDLES.of_others()

    def adopt_changes(self) -> None:
        """Apply to the sharded parameters what users have changed on the installed leaves, if any are installed."""
        if not self._leaf_flags:  # none are
            return
        self.note_assigned()
        before, self._leaf_flags = self._leaf_flags, list(map(_requires_grad, self._installed))
        if self._leaf_flags != before:
            for param, was, wanted in zip(self.params, before, self._leaf_flags, strict=True):
                if wanted != was:
                    param.sharded.requires_grad_(wanted)
        if self._handles_seen != (seen := HANDLES.of_others()):
            self._handles_seen = seen
            for param, leaf in zip(self.params, self._installed, strict=True):
                param.hooks.take_over(leaf, param.sharded)

    def note_assigned(self) -> None:
        """Note tensors that users have assigned over installed ones, because others are about to be installed.

        `install_sharded` puts them back, so that the next `adopt` finds them.
        """
        if not self._hold(self._installed):
            self._assigned = [
                (names, name, self._shard_of(now))
                for names, name, index in self.places
                if (now := names.get(name)) is not self._installed[index]
            ]

    def _shard_of(self, tensor: Any) -> Any:
        """The sharded parameter for which `tensor` is installed; `tensor` itself if there is none."""
        return next((self._shards[index] for index, own in enumerate(self._installed) if own is tensor), tensor)

    def install_sharded(self, traced: bool = False) -> None:
        """Install the sharded parameters, then the tensors that users have assigned; `traced` as for `install`."""
        if self.are_replaced and traced:
            for names, name, index in self._traced:
                names[name] = self._shards[index]
            for known, name, _ in self._apart:
                known().__dict__.pop(name, None)
            self._installed, self.are_replaced = self._shards, False
        elif self.are_replaced:
            self.install(self._shards)
            self.are_replaced = False
            for names, name, assigned in self._assigned:
                names[name] = assigned

    def installed(self, index: int) -> torch.Tensor:
        """The installed tensor of a parameter, by index."""
        return self._installed[index]

    def index_of(self, tensor: torch.Tensor) -> int | None:
        """The index of the parameter whose sharded or unsharded tensor this is; None if it is not one of ours."""
        copy_of = tensor.__dict__.get(LEAF_OF)
        for index, param in enumerate(self.params):
            if tensor is param.sharded or tensor is self._installed[index] or param.fqn == copy_of:
                return index
        return None

    def move(self, moved: Sequence[Place]) -> None:
        """Add places into which parameters were moved, and drop their old places that are empty now."""
        indices = {index for _, _, index in moved}
        kept = [(own, name, at) for own, name, at in self.places if at not in indices or own.get(name) is not None]
        self._set_places([*kept, *moved])
        self._install_anew()

    def keep_carried(self) -> None:
        """Set the attributes of packed parameters again on sharded ones that a conversion or a load has re-created."""
        for param in self.params:
            if param.carried is not None:
                param.carried.keep(param.sharded)

    def check_kept(self) -> None:
        """Check that modules still have the tensors that were installed last.

        Raises:
            ShardConfigStateError: one was replaced, for example by `torch.func.functional_call`.
        """
        if self._hold(self._installed):
            return
        for names, name, index in self.places:
            if names.get(name) is not self._installed[index]:
                raise ShardConfigStateError(
                    f"parameter {self.params[index].fqn}: was replaced by {_kind(names.get(name))} while the model "
                    "runs (by torch.func.functional_call?), and the gathered parameter would overwrite it; use a "
                    "module that is not sharded for such calls"
                )

    def take_own_dtype_grads(self) -> dict[int, torch.Tensor | None]:
        """Before a conversion, remove and return `.grad` of the parameters with a `grad_dtype`.

        `Module._apply` would convert it to the dtype of the parameter, and drop `grad_dtype`. `return_own_dtype_grads`
        sets both again.
        """
        typed: dict[int, torch.Tensor | None] = {}
        for index, param in enumerate(self.params):
            param.adopt_grad_dtype()
            if param.grad_dtype.is_set:
                typed[index] = param.sharded.grad
                param.set_gradient(None)
        return typed

    def return_own_dtype_grads(self, typed: Mapping[int, torch.Tensor | None]) -> None:
        """Set `grad_dtype`, and `.grad` in its own dtype, on the converted parameters."""
        for names, name, index in self.places:
            param = names.get(name)
            if index in typed and param is not None:
                self.params[index].adopt_grad_dtype(on=param)
                if (grad := typed[index]) is not None and param.grad is None:
                    self.params[index].set_gradient(grad.to(param.device), on=param)

    def adopt(self) -> bool:
        """Adopt parameters by which a load or a conversion has replaced sharded ones.

        Returns:
            whether parameters were replaced, tied or converted since the last call.

        Raises:
            ShardConfigStateError: an entry was deleted; or it does not contain a DTensor with the shape, mesh and
                placements of the old one; or an unsharded copy was replaced; or `.data` of a sharded parameter was
                assigned a tensor that is no DTensor or has another dtype (`_check_data`).
        """
        if self._leaf_flags:
            self._check_leaves()
            self.adopt_changes()
        if not torch.compiler.is_compiling():
            self._check_data()
        if self._assigned:
            self.install_sharded()
            self._assigned = []
        if self.are_replaced or self._hold(self._shards):
            changed, self.converted = self.converted, False
            return changed
        tied = self._tie()
        replaced = self._replaced()
        if replaced:
            self._replace(replaced)
        self.keep_carried()
        self._install_anew()
        changed, self.converted = self.converted or tied or len(replaced) > 0, False
        return changed

    def _replace(self, replaced: dict[int, nn.Parameter]) -> None:
        """Manage these parameters instead of the sharded ones with these indices."""
        # If an earlier parameter comes back, a context such as `functional_call` has ended. Otherwise remember the ones
        # that are replaced, to recognize them when it ends.
        returns = any(self._is_known(param, index) for index, param in replaced.items())
        self._before = {} if returns else {index: weakref.ref(self._shards[index]) for index in replaced}
        for index, param in replaced.items():
            self.params[index].sharded = self._shards[index] = param
            if not torch.compiler.is_compiling():
                self.params[index].prepare()
        self._storages, self._pieces = [], []
        if not torch.compiler.is_compiling():
            self._set_places(self.places)  # the new ones may be of another class

    def _is_known(self, param: Any, index: int) -> bool:
        """Whether `param` is the sharded parameter with this index, or the one that was replaced by it."""
        before = self._before.get(index)
        return param is self._shards[index] or (before is not None and before() is param)

    def _check_leaves(self) -> None:
        """Refuse parameters that were assigned over leaves.

        `torch.func.functional_call` assigns parameters for one call, and afterwards assigns what was there before the
        call. There are two cases:

        - Leaves were there before. If the parameters of the call were adopted, the module would have leaves after the
          call, but the group the parameters of the call instead of its own.
        - The leaves were installed during the call. Then the parameters from before the call are assigned over them.
          These are accepted (`_is_known`).

        Raises:
            ShardConfigStateError: a leaf was replaced by a DTensor that is not ours.
        """
        if self._hold(self._installed):
            return
        for names, name, index in self.places:
            now = names.get(name)
            if isinstance(now, DTensor) and self._shard_of(now) is now and not self._is_known(now, index):
                raise ShardConfigStateError(
                    f"parameter {self.params[index].fqn}: was replaced while its unsharded copy was in the module, for "
                    "example after a forward; call reshard() on the sharded module first, then replace parameters or "
                    "use torch.func.functional_call"
                )

    def _check_data(self) -> None:
        """Detect an assignment to `.data` of a sharded parameter: a DTensor silently keeps its old local tensor.

        After such an assignment the DTensor has another storage, but the same local tensor. After a conversion it has
        another local tensor.

        Raises:
            ShardConfigStateError: the assigned tensor is not a DTensor, or has another dtype.
        """
        with without_torch_function():
            storages = [*map(_storage, self._shards)]
        if len(storages) == len(self._storages) and all(map(is_, storages, self._storages)):
            return
        known = () if self.converted else self._pieces
        # `known` is empty after a conversion, so that nothing is compared.
        for param, now, before, piece in zip(self.params, storages, self._storages, known, strict=False):
            if now is not before and piece() is local_tensor(param.sharded):
                self._say_lost(param)
        self._storages, self._pieces = storages, [weakref.ref(local_tensor(shard)) for shard in self._shards]

    def _say_lost(self, param: ShardedParam) -> None:
        """Raise an error; only warn, once, if the assigned tensor may be a view of the parameter's own data."""
        kept = param.sharded
        what = f"parameter {param.fqn}: its .data was assigned after sharding, which has no effect on a DTensor: "
        instead = "Write into it instead, for example by param.data.copy_(...)"
        # A DTensor itself has no memory (address 0). With an address, a plain tensor was assigned.
        if address_of(kept) or kept.dtype != local_tensor(kept).dtype:
            raise ShardConfigStateError(f"{what}it still has its old values. {instead}")
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{what}the new values are lost, unless they are its own data. {instead}", stacklevel=2)

    def _replaced(self) -> dict[int, nn.Parameter]:
        """By index: the parameters that replace sharded ones. Each must have the same shape, mesh and placements."""
        replaced: dict[int, nn.Parameter] = {}
        for names, name, index in self.places:
            param, now = self.params[index], names.get(name)
            if now is param.sharded:
                continue
            if not isinstance(now, DTensor) or _spec(now) != _spec(param.sharded) or not now.is_leaf:
                raise ShardConfigStateError(
                    f"parameter {param.fqn}: was replaced by {_kind(now)} after sharding; "
                    "change the values of the DTensor parameter in place, or replace it by a DTensor with the same "
                    "shape, mesh and placements"
                    f"{'' if now is None or now.is_leaf else '; this one is not a leaf'}"
                )
            replaced[index] = now
        return replaced

    def _tie(self) -> bool:
        """Note entries that now contain another parameter of the group, because users have tied the two.

        If such a parameter were adopted in place of the one that it replaces, one tensor would get two gradients, and
        one of these would be lost. If it is no longer in its own entry, it was moved, and is adopted.

        Returns:
            whether there are such entries.
        """
        places = [(names, name, self._home_of(names.get(name), index)) for names, name, index in self.places]
        tied = [index for *_, index in places] != [index for *_, index in self.places]
        if tied:
            self._set_places(places)
        return tied

    def _home_of(self, tensor: Any, index: int) -> int:
        """The index of the sharded parameter `tensor`, if it is still in its own entry; else `index`."""
        for names, name, at in self.places:
            if tensor is self._shards[at] and names.get(name) is tensor:
                return at
        return index

    def _set_places(self, places: Sequence[Place]) -> None:
        self.places, self._columns = list(places), _Columns.of(places)
        # Dynamo sees only the entries of `_traced`. For parameters that define their own all-gather, traced code sets
        # attributes of the modules during a forward instead of entries. Otherwise Dynamo would guard on the tensors
        # inside of these parameters, which change, and would call their `__tensor_flatten__` in each forward, which may
        # read values from the device. Graphs look at all entries when they run.
        hidden = {index for index, param in enumerate(self.params) if DELETES_ATTRIBUTES and is_extended(param)}
        apart = [(names, name, index) for names, name, index in self.places if index in hidden]
        known = self._modules
        self._apart = [(known[id(names)], name, index) for names, name, index in apart if id(names) in known]
        self._traced = [place for place in self.places if place[2] not in hidden]

    def _install_anew(self) -> None:
        """Install the current tensors into all places, including new and changed ones."""
        for names, name, index in self.places:
            names[name] = self._installed[index]  # type: ignore[assignment]

    def _hold(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the modules contain exactly these tensors, which are in the order of the parameters."""
        dicts, names, indices = self._columns
        expected = tensors if indices is None else [tensors[index] for index in indices]
        return all(map(is_, map(dict.get, dicts, names), expected))


def list_anew(module: Any) -> None:
    """Rebuild the weight list of an RNN. The RNN's own method would copy the weights to new memory on CUDA."""
    flat = [module._parameters[name] for name in module._flat_weights_names]
    module._flat_weights = flat
    # Dynamo cannot compare weak references, and a traced module does not need them.
    traced = torch.compiler.is_compiling()
    module._flat_weight_refs = [None if traced else weakref.ref(weight) for weight in flat]


def _spec(tensor: Any) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.device_mesh, tensor.placements


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
