"""The entries of `_parameters` in which modules look up a group's parameters, and what is installed in them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, is_, setitem
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._errors import ShardConfigStateError
from .._group.faces import LEAF_OF
from .._group.param import ShardedParam, run_all
from .._torch.core import HANDLES, address_of, without_torch_function
from .._torch.distributed import local_tensor

_setitem: Callable[[dict[str, Any], str, Any], None] = setitem
_requires_grad = attrgetter("requires_grad")
_storage = torch.Tensor.untyped_storage

Place = tuple[dict[str, nn.Parameter | None], str, int]  # a module's `_parameters`, a name there, and the index


class _Columns(NamedTuple):
    """The columns of all places, over which every forward maps; `indices` is None if they count up from 0."""

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

    The dictionaries are held, never the modules, so that a module is not kept alive by its own state.

    Args:
        places: the entries. A tied parameter has several.
        params: the sharded parameters, tied ones once.

    Attributes:
        places, params: as given; users may move or tie parameters.
        shown: whether other tensors than the sharded parameters are installed.
        converted: whether `adopt` shall report a change even if it finds none.
    """

    def __init__(self, places: Sequence[Place], params: Sequence[ShardedParam]) -> None:
        self.params = params
        self.places = list(places)
        self.shown = False
        self.converted = False
        self._columns = _Columns.of(places)
        self._shards = [param.sharded for param in params]
        self._installed: Sequence[torch.Tensor] = self._shards
        self._lent: list[bool] = []  # `requires_grad` of what is installed, if users may set it
        self._handles_seen = 0  # hooks' handles that there were then
        self._assigned: list[tuple[dict[str, Any], str, Any]] = []  # see `note_assigned`
        self._recurrent: list[weakref.ref[nn.Module]] = []
        self._has_warned = False
        self._before: dict[int, weakref.ref[nn.Parameter]] = {}  # by index, what was replaced last
        # Of the sharded parameters as they were seen last: the storage of each DTensor, and this rank's piece in it.
        self._storages: list[Any] = []
        self._pieces: list[weakref.ref[torch.Tensor]] = []
        self._check_data()

    def __getstate__(self) -> dict[str, Any]:
        # a copy's engine sets the lists for its own modules
        return self.__dict__ | {"_recurrent": [], "_storages": [], "_pieces": [], "_before": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._check_data()

    def keep_lists(self, recurrent: Sequence[nn.Module]) -> None:
        """Note which of these RNNs have our parameters: `_flat_weights`, their second list, must follow the entries."""
        ours = {id(names) for names in self._columns.dicts} if recurrent else ()
        of_ours = [module for module in recurrent if id(module._parameters) in ours]
        self._recurrent = [
            weakref.ref(module)
            for module in of_ours
            if module._parameters.keys() >= {*vars(module)["_flat_weights_names"]}
        ]

    def name_modules(self, names: Mapping[int, str]) -> None:
        """Modules have these names in the root, by id of their `_parameters`; here nothing asks for them."""

    def follow(self) -> None:
        """Do what `adopt` does, while Dynamo traces.

        If parameters were replaced, `converted` is set, and `adopt` reports it to the engine in the next eager forward.
        """
        if self.shown:
            return
        if any([names.get(name) is not self._shards[index] for names, name, index in self.places]):  # noqa: C419
            self.adopt()
            self.converted = True

    def show(self, tensors: Sequence[torch.Tensor], traced: bool = False) -> None:
        """Install these tensors; with `traced`, one by one, which Dynamo can trace."""
        if self._lent and not traced:
            self.take_over()
            self._lent = []
        self.shown = True
        self._installed = tensors
        if traced:
            for names, name, index in self.places:
                names[name] = tensors[index]  # type: ignore[assignment]
        else:
            dicts, names_in, indices = self._columns
            run_all(map(_setitem, dicts, names_in, tensors if indices is None else [tensors[i] for i in indices]))
        for known in self._recurrent:
            if (module := known()) is not None:
                list_anew(module)

    def lend(self, leaves: Sequence[torch.Tensor]) -> None:
        """Install leaves, which users may freeze, thaw or hook in the place of the sharded parameters."""
        self.show(leaves)
        self._lent = list(map(_requires_grad, leaves))
        self._handles_seen = HANDLES.of_others()

    def take_over(self) -> None:
        """Do to the sharded parameters what users have done to the leaves that are installed, if any are."""
        if not self._lent:
            return
        self.note_assigned()
        before, self._lent = self._lent, list(map(_requires_grad, self._installed))
        if self._lent != before:
            for param, was, wanted in zip(self.params, before, self._lent, strict=True):
                if wanted != was:
                    param.sharded.requires_grad_(wanted)
        if self._handles_seen != (seen := HANDLES.of_others()):
            self._handles_seen = seen
            for param, leaf in zip(self.params, self._installed, strict=True):
                param.hooks.take_over(leaf, param.sharded)

    def note_assigned(self) -> None:
        """Note what users have put in the place of what is installed: `hide` puts it back, and `adopt` looks at it."""
        if not self._hold(self._installed):
            self._assigned = [
                (names, name, self._shard_of(now))
                for names, name, index in self.places
                if (now := names.get(name)) is not self._installed[index]
            ]

    def _shard_of(self, tensor: Any) -> Any:
        """The sharded parameter in whose place `tensor` is installed; any other tensor itself."""
        return next((self._shards[index] for index, own in enumerate(self._installed) if own is tensor), tensor)

    def hide(self, traced: bool = False) -> None:
        """Install the sharded parameters again, and what users have assigned; `traced` as for `show`."""
        if self.shown:
            self.show(self._shards, traced)
            self.shown = False
            for names, name, assigned in self._assigned:
                names[name] = assigned

    def installed(self, index: int) -> torch.Tensor:
        """The installed tensor of a parameter, by index."""
        return self._installed[index]

    def index_of(self, tensor: torch.Tensor) -> int | None:
        """The index of the parameter that `tensor` is, sharded or unsharded; None if it is none of ours."""
        copy_of = tensor.__dict__.get(LEAF_OF)
        for index, param in enumerate(self.params):
            if tensor is param.sharded or tensor is self._installed[index] or param.fqn == copy_of:
                return index
        return None

    def move(self, moved: Sequence[Place]) -> None:
        """Parameters were put into these places as well: note them, and drop the old ones that are empty."""
        indices = {index for _, _, index in moved}
        kept = [(own, name, at) for own, name, at in self.places if at not in indices or own.get(name) is not None]
        self._set_places([*kept, *moved])
        self._install_anew()

    def keep_carried(self) -> None:
        """Put what packed parameters carry on the sharded ones again, which a conversion or a load has made anew."""
        for param in self.params:
            if param.carried is not None:
                param.carried.keep(param.sharded)

    def check_kept(self) -> None:
        """Check that modules still have the tensors that were installed last.

        Raises:
            ShardConfigStateError: somebody has replaced one, as `torch.func.functional_call` does.
        """
        if self._hold(self._installed):
            return
        for names, name, index in self.places:
            if names.get(name) is not self._installed[index]:
                raise ShardConfigStateError(
                    f"parameter {self.params[index].fqn}: {_kind(names.get(name))} was put in its place while the "
                    "model runs (by torch.func.functional_call?), and sharding would put its own over it; use a "
                    "module that is not sharded for such calls"
                )

    def adopt(self) -> bool:
        """Take over parameters that a load or a conversion has put in the place of sharded ones.

        Returns:
            whether parameters were replaced, tied or converted since the last call.

        Raises:
            ShardConfigStateError: an entry is gone, or has no DTensor with the shape, mesh and placements of the old
                one; or stands in the place of an unsharded copy; or the `.data` of a sharded parameter was assigned.
        """
        self._check_leaves()
        self.take_over()
        if not torch.compiler.is_compiling():
            self._check_data()
        if self._assigned:
            self.hide()
            self._assigned = []
        if self.shown or self._hold(self._shards):
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
        """Manage these parameters in the place of the sharded ones with these indices."""
        returns = any(self._is_known(param, index) for index, param in replaced.items())
        self._before = {} if returns else {index: weakref.ref(self._shards[index]) for index in replaced}
        for index, param in replaced.items():
            self.params[index].sharded = self._shards[index] = param
            if not torch.compiler.is_compiling():
                self.params[index].prepare()
        self._storages, self._pieces = [], []

    def _is_known(self, param: Any, index: int) -> bool:
        """Whether it is the sharded parameter, or the one that it has replaced."""
        before = self._before.get(index)
        return param is self._shards[index] or (before is not None and before() is param)

    def _check_leaves(self) -> None:
        """Refuse other parameters in the place of leaves. Who puts the leaves back later would get the other ones.

        A replaced parameter may come back, as it does after `torch.func.functional_call`.

        Raises:
            ShardConfigStateError: a DTensor that is not ours stands in the place of a leaf.
        """
        if not self._lent or self._hold(self._installed):
            return
        for names, name, index in self.places:
            now = names.get(name)
            if isinstance(now, DTensor) and self._shard_of(now) is now and not self._is_known(now, index):
                raise ShardConfigStateError(
                    f"parameter {self.params[index].fqn}: was replaced while its unsharded copy stood in the module, "
                    "as one does after a forward; call reshard() on the sharded module first, then replace parameters "
                    "or call it by torch.func.functional_call"
                )

    def _check_data(self) -> None:
        """Notice `.data` that was assigned to a sharded parameter: a DTensor keeps its old piece without a word.

        Such a DTensor has another storage around the same piece. A conversion gives it another piece.

        Raises:
            ShardConfigStateError: what was assigned is no DTensor, or of another dtype.
        """
        with without_torch_function():
            storages = [*map(_storage, self._shards)]
        if len(storages) == len(self._storages) and all(map(is_, storages, self._storages)):
            return
        known = () if self.converted else self._pieces
        for param, now, before, piece in zip(self.params, storages, self._storages, known, strict=False):
            if now is not before and piece() is local_tensor(param.sharded):
                self._say_lost(param)
        self._storages, self._pieces = storages, [weakref.ref(local_tensor(shard)) for shard in self._shards]

    def _say_lost(self, param: ShardedParam) -> None:
        """Raise, or warn once where what was assigned may be a view of the parameter's own data, and so no loss."""
        kept = param.sharded
        what = f"parameter {param.fqn}: its .data was assigned after sharding, which a DTensor does not take over: "
        instead = "Write into it instead, as by param.data.copy_(...)"
        if address_of(kept) or kept.dtype != local_tensor(kept).dtype:
            raise ShardConfigStateError(f"{what}it still has its old values. {instead}")
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{what}unless that was its own data, it is lost. {instead}", stacklevel=2)

    def _replaced(self) -> dict[int, nn.Parameter]:
        """By index: the parameters that were put in the place of sharded ones, checked to be placed alike."""
        replaced: dict[int, nn.Parameter] = {}
        for names, name, index in self.places:
            param, now = self.params[index], names.get(name)
            if now is param.sharded:
                continue
            if not isinstance(now, DTensor) or _spec(now) != _spec(param.sharded) or not now.is_leaf:
                raise ShardConfigStateError(
                    f"parameter {param.fqn}: was replaced by {_kind(now)} after sharding; "
                    "change the values of the DTensor parameter in place, or replace it by one placed alike"
                    f"{'' if now is None or now.is_leaf else '; this one is computed from others'}"
                )
            replaced[index] = now
        return replaced

    def _tie(self) -> bool:
        """Note entries that now hold another parameter of the group: users have tied the two.

        That parameter must still be in an entry of its own. To adopt it as the replaced parameter instead would give
        one tensor two gradients, of which one would be lost.

        Returns:
            whether there are such entries.
        """
        places = [(names, name, self._home_of(names.get(name), index)) for names, name, index in self.places]
        tied = [index for *_, index in places] != [index for *_, index in self.places]
        if tied:
            self._set_places(places)
        return tied

    def _home_of(self, tensor: Any, index: int) -> int:
        """The index of the sharded parameter that `tensor` is, if an entry of its own still holds it; else `index`."""
        for names, name, at in self.places:
            if tensor is self._shards[at] and names.get(name) is tensor:
                return at
        return index

    def _set_places(self, places: Sequence[Place]) -> None:
        self.places, self._columns = list(places), _Columns.of(places)

    def _install_anew(self) -> None:
        """Put what is installed into all places, among them such as are new or were changed."""
        for names, name, index in self.places:
            names[name] = self._installed[index]  # type: ignore[assignment]

    def _hold(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the modules have these tensors, in the order of the parameters."""
        dicts, names, indices = self._columns
        expected = tensors if indices is None else [tensors[index] for index in indices]
        return all(map(is_, map(dict.get, dicts, names), expected))


def list_anew(module: Any) -> None:
    """Rebuild the list of an RNN; not by its own method, which copies the weights to new memory on CUDA."""
    flat = [module._parameters[name] for name in module._flat_weights_names]
    module._flat_weights = flat
    # Dynamo cannot compare weak references, and a traced module does not need them.
    traced = torch.compiler.is_compiling()
    module._flat_weight_refs = [None if traced else weakref.ref(weight) for weight in flat]


def _spec(tensor: Any) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.device_mesh, tensor.placements


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
