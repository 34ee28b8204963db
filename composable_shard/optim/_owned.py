"""`owned`: an optimizer that steps whole matrices, each at one rank, while parameters are sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from .._comm.own_groups import next_number
from .._errors import ComposableShardError, ShardConfigStateError, ShardConfigTypeError, ShardConfigValueError
from .._faults.watch import WATCHER
from .._group.param import SHARDED_IN
from .._torch.core import never_trace
from ._checks import IN_PARTS, check_steps_once, check_takes_dense, title_of
from ._forecast import sent_by
from ._layout import Layout, Route
from ._matrices import (
    Blocks,
    Bucket,
    Cost,
    Matrix,
    Owners,
    blocks_by_name,
    in_buckets,
    newton_schulz_cost,
    routes_of,
)
from ._rounds import Round, run, stand_in
from ._sharded_state import Family, Kept
from ._state import Path, leaf_at, mapped, sketched

BUCKET_BYTES = 64 << 20
OWNER, SHARDS = "owner", "shards"
Make = Callable[..., Optimizer]
State = dict[torch.Tensor, Any]
Shape = tuple[int, ...]
_TWO_OPTIMIZERS = (
    "give `owned` the matrices alone, and all others to an optimizer of their own: "
    "[(name, p) for name, p in model.named_parameters() if p.ndim == 2]"
)


def owned(
    kind: Make,
    params: nn.Module | Iterable[Any],
    *,
    state: str = OWNER,
    blocks: Mapping[str, Blocks] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    cost: Cost = newton_schulz_cost,
    **options: Any,
) -> Owned:
    """An optimizer of any class that needs whole matrices, for sharded parameters.

        matrices = [(n, p) for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
        muon = cs.optim.owned(torch.optim.Muon, matrices, lr=0.02, blocks={"*.qkv.weight": cs.optim.Blocks(64)})
        others = {id(p) for _, p in matrices}
        adamw = torch.optim.AdamW([p for p in model.parameters() if id(p) not in others])

    Each matrix has an owner, one of the ranks over which it is cut. In a step the owner gets the other ranks' parts of
    gradient and value, steps the whole matrix by an optimizer of the class, and sends the values back. So each product
    is computed once, and not on every rank. All ranks choose the same owners, without communication: a matrix that one
    rank holds stays there; each other one, the most expensive first, goes to the rank with the least to compute.

    What a matrix is: a parameter; each matrix of a 3D parameter, as experts are; each block of rows, where `blocks`
    says so. Parameters of other shapes are stepped whole. Replicas (HSDP) do the same, each among themselves; beside
    tensor parallelism a matrix is put together over all axes that cut it.

    Args:
        kind: class of the optimizer, or a function that makes one of a list of param groups and `options`. It keeps
            state by parameter and needs no closure.
        params: a sharded model; parameters, as ``(name, parameter)`` or alone; or param groups of these.
        state: where the optimizer's state is between steps: whole, with the owner (``"owner"``); or in parts, cut as
            the matrices are, which travel to the owner and back in every step (``"shards"``).
        blocks: by names of parameters, or patterns of `fnmatch`, how rows of these make matrices of their own.
        bucket_bytes: of whole parameters that one rank gets in one exchange; a larger matrix travels alone. A step
            takes up to eight times so much memory: values and gradients of a bucket that is stepped, of the next one
            as sent and as received, and values of the one before.
        cost: what a step of a matrix of a shape costs, in any unit.
        options: of `kind`.

    Raises:
        ShardConfigTypeError: `kind` makes no optimizer, or one whose step needs a closure or sparse gradients.
        ShardConfigValueError: `kind` does not take a parameter, which is named; or an argument cannot be.
        ShardConfigUnsupportedError: a parameter is placed in another way than sharded or replicated.
    """
    return Owned(kind, params, state=state, blocks=blocks, bucket_bytes=bucket_bytes, cost=cost, **options)


class Owned(Optimizer):
    """What `owned` makes, with its arguments: an optimizer of sharded parameters, for schedulers and checkpoints.

    `state_dict` and `load_state_dict` are collectives: all ranks call them. A state dict holds DTensors that are cut as
    their parameters, so that it can be loaded at any number of ranks. `state` shows what this rank has of it.

    Attributes:
        sent_bytes: bytes that this rank has sent to others in the last step.
    """

    def __init__(
        self,
        kind: Make,
        params: nn.Module | Iterable[Any],
        *,
        state: str = OWNER,
        blocks: Mapping[str, Blocks] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        cost: Cost = newton_schulz_cost,
        **options: Any,
    ) -> None:
        _check_arguments(state, bucket_bytes)
        self._make, self._options, self._in_shards = kind, options, state == SHARDS
        self._bucket_bytes, self._owners = bucket_bytes, Owners(cost)
        self._names, groups = _named(params)
        self._blocks = blocks_by_name([*self._names.values()], blocks or {})
        self._kept: list[Kept] = []
        self._of: dict[torch.Tensor, list[Kept]] = {}
        self._buckets: list[Bucket] = []
        self._number = 0
        self.sent_bytes = 0
        super().__init__(groups, _defaults(kind, options))

    @property
    def exchange_bytes(self) -> int:
        """Bytes that this rank will send to others in a step in which all matrices have a gradient, state left out."""
        return sum([sent_by(bucket.layout.rank, bucket.matrices) for bucket in self._buckets])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Step other parameters, too; all ranks add the same.

        Raises:
            ShardConfigValueError, ShardConfigUnsupportedError: as `owned`.
        """
        super().add_param_group(param_group)
        try:
            self._take(len(self.param_groups) - 1)
        except BaseException:
            self.param_groups.pop()
            raise

    def _take(self, index: int) -> None:
        """Find owners for the matrices of a param group."""
        group = self.param_groups[index]
        options = _options(group)
        params, routes = self._routes(index, group["params"], options)
        chosen = self._owners.assign([(route, params[name].requires_grad) for name, route in routes.items()])
        names = [*routes]
        matrices = {at: _matrix(names[at], params[names[at]], routes[names[at]].to(owner)) for at, owner in chosen}
        inner_of: dict[Matrix, Optimizer | None] = {}
        for many in in_buckets([*matrices.values()], self._bucket_bytes):
            wholes = [matrix.whole for matrix in many if matrix.whole is not None]
            inner = self._make([{**options, "params": wholes}], **self._options) if wholes else None
            self._buckets.append(
                Bucket(index, tuple(many), many[0].route.layout, many[0].stays, inner, len(self._buckets))
            )
            inner_of |= dict.fromkeys(many, inner)
        IN_PARTS.update(filter(None, inner_of.values()))
        for _, matrix in sorted(matrices.items()):
            self._kept.append(Kept(matrix, inner_of[matrix]))
            self._of.setdefault(matrix.param, []).append(self._kept[-1])
        self._number = self._number or next_number(next((layout.group for layout in self._layouts()), None))

    def _routes(
        self, index: int, params: Sequence[torch.Tensor], options: dict[str, Any]
    ) -> tuple[dict[str, torch.Tensor], dict[str, Route]]:
        """By name of a matrix, the parameter that it is in and its way; the optimizer takes all of them."""
        param_of: dict[str, torch.Tensor] = {}
        routes: dict[str, Route] = {}
        kinds: dict[tuple[Shape, torch.dtype], str] = {}
        for position, param in enumerate(params):
            name = self._name_of(param, index, position)
            own = routes_of(name, param, self._blocks.get(name))
            if not own.keys().isdisjoint(routes):  # without names of the user's, alike layers have alike names
                name = f"{name} (params.{position})"
                own = routes_of(name, param, None)
            routes |= own
            param_of |= dict.fromkeys(own, param)
            kinds |= {(route.shape, param.dtype): kinds.get((route.shape, param.dtype), name) for route in own.values()}
        self._check_accepted(kinds, options)
        return param_of, routes

    def _name_of(self, param: torch.Tensor, group: int, at: int) -> str:
        name: str = self._names.get(param) or param.__dict__.get(SHARDED_IN) or f"param_groups.{group}.params.{at}"
        return name

    def _check_accepted(self, kinds: Mapping[tuple[Shape, torch.dtype], str], options: dict[str, Any]) -> None:
        """See, on all ranks, that the optimizer takes such parameters.

        Raises:
            ShardConfigValueError: it does not; the first one that it refuses is named.
        """
        for (shape, dtype), name in kinds.items():
            param = _parameter(torch.empty(shape, dtype=dtype, device="meta"))
            try:
                check_takes_dense(name, self._make([{**options, "params": [param]}], **self._options))
            except ShardConfigTypeError:
                raise
            except Exception as error:
                raise ShardConfigValueError(
                    f"parameter {name}: {title_of(self._make)} does not take it, of shape {shape} and {dtype}: {error}"
                    f"; {_TWO_OPTIMIZERS}"
                ) from error

    def __getstate__(self) -> dict[str, Any]:
        raise ShardConfigStateError(
            "an optimizer of `owned` holds process groups and cannot be copied or pickled; make another one, and load "
            "what its state_dict gives"
        )

    # ---- a step

    @never_trace
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all matrices that have a gradient. A collective: all ranks call it, with gradients of the same ones.

        Args:
            closure: computes the loss and makes the gradients; it is called once, before anything is sent.

        Returns:
            what the closure has returned.

        Raises:
            ShardConfigStateError: a gradient is not cut as its parameter; a parameter has changed its dtype; or the
                optimizer keeps state beside that of parameters.
            RankMismatchError: other ranks step other matrices; nothing was sent.
            PeerLostError: another rank has failed, or is lost.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._telling():
            self._step()
        return loss

    def _step(self) -> None:
        rounds = self._rounds()
        run(rounds, [_options(group) for group in self.param_groups])
        if self._in_shards:
            self._first_to_shards([each for each in rounds if not each.bucket.stays])
        self.sent_bytes = sum([each.nbytes for each in rounds])
        self._show({matrix.param for each in rounds for matrix in each.matrices})

    def _rounds(self) -> list[Round]:
        """What is to be done in a step: the buckets in which a matrix has a gradient."""
        stepped = [(bucket, bucket.stepped()) for bucket in self._buckets]
        for _, matrices in stepped:
            _check_dtypes(matrices)
        return [Round(bucket, matrices, self._note) for bucket, matrices in stepped if matrices]

    @property
    def _note(self) -> str:
        return f"{title_of(self._make)} {self._number}"

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Tell other ranks of an error of this one, for which they would wait."""
        try:
            yield
        except BaseException as error:
            ledgers = [ledger for layout in self._layouts() for ledger in layout.ledgers]
            if isinstance(error, ComposableShardError) and any(ledger.fault is not None for ledger in ledgers):
                raise
            why = f"{type(error).__name__}: {error}"
            for ledger in ledgers:
                ledger.leave(why)
            WATCHER.failed(why)
            raise

    def _layouts(self) -> list[Layout]:
        """One layout for each process group over which matrices are cut, in one order on all ranks."""
        return list({bucket.group: bucket.layout for bucket in self._buckets if bucket.group is not None}.values())

    def _show(self, params: Iterable[torch.Tensor]) -> None:
        """Have `state` show what this rank has of the state of these parameters."""
        for param in params:
            shown = [kept.shown() for kept in self._of[param]]
            if len(shown) == 1:
                self.state[param] = shown[0]
            else:
                self.state[param] = {f"{i}.{key}": value for i, held in enumerate(shown) for key, value in held.items()}

    # ---- state as shards

    def _first_to_shards(self, rounds: Sequence[Round]) -> None:
        """Send state that came to be in this step to the shards."""
        new = {each.bucket: [matrix for matrix in each.matrices if matrix.sketch is None] for each in rounds}
        if any(new.values()):
            sketches = self._agreed_sketches()
            self._scatter(new, {matrix: sketches.get(matrix, {}) for matrices in new.values() for matrix in matrices})

    def _scatter(self, matrices: Mapping[Bucket, Sequence[Matrix]], sketches: Mapping[Matrix, Any]) -> None:
        """Send the state of matrices, which have these sketches, from their owners to the shards."""
        for bucket, some in matrices.items():
            for matrix in some:
                matrix.keep(sketches[matrix])
            if some:
                Round(bucket, some, self._note).scatter_state()

    def _agreed_sketches(self) -> dict[Matrix, Any]:
        """A sketch of the state of each matrix that has one, from its owner."""
        held = [kept.state() for kept in self._kept]
        own = {index: sketched(state) for index, state in enumerate(held) if state}
        agreed = dict(own)
        for layout in self._layouts():
            for ledger in layout.ledgers:
                ledger.issue(f"{self._note}, sketches of its state")
            of_ranks: list[Any] = [None] * len(layout.boxes)
            dist.all_gather_object(of_ranks, own, layout.group)
            for of_rank in of_ranks:
                agreed |= of_rank
        return {self._kept[index].matrix: sketch for index, sketch in agreed.items()}

    # ---- state dicts

    def state_dict(self) -> dict[str, Any]:
        """The state of all ranks, in DTensors that are cut as the parameters. A collective: all ranks call it.

        A tensor of the shape of the matrices is one of the parameter's shape; another one of a parameter that has
        several matrices has one more dim, the first, and is cut along that, as are all others.

        Raises:
            ShardConfigStateError: matrices of one parameter have different states, such as step counts.
        """
        shown = dict(self.state)
        with self._telling():
            sharded = self.sharded_state()
        self.state.clear()
        self.state.update(sharded)
        try:
            return super().state_dict()
        finally:
            self.state.clear()
            self.state.update(shown)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, here or at another number of ranks. A collective: all ranks call it.

        Args:
            state_dict: its tensors are DTensors on the mesh of their parameters, or whole and the same on all ranks.

        Raises:
            ShardConfigValueError: state does not fit to its parameter, which is named.
        """
        super().load_state_dict(state_dict)
        params = [param for group in self.param_groups for param in group["params"]]
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        loaded: State = {}
        for key, param in zip(keys, params, strict=True):
            if param in self.state:
                loaded[param] = _as_given(self.state[param], state_dict["state"].get(key))
        with self._telling():
            self.put_sharded_state(loaded)

    def sharded_state(self) -> State:
        """The state by parameter, as in a state dict. A collective: all ranks call it."""
        sketches = self._agreed_sketches()
        state: State = {}
        for param, members in self._of.items():
            of_matrices = [sketches.get(kept.matrix) for kept in members]
            if any(each != of_matrices[0] for each in of_matrices):
                raise ShardConfigStateError(
                    f"parameter {members[0].matrix.name}: its matrices have different states, such as step counts, "
                    "which no state dict can hold"
                )
            if of_matrices[0] is not None:
                state[param] = Family(param, members, self._note).to_shards(of_matrices[0])
        return state

    def put_sharded_state(self, state: Mapping[torch.Tensor, Any]) -> None:
        """Replace all state by what `sharded_state` gave. A collective: all ranks call it.

        Raises:
            ShardConfigValueError: state does not fit to its parameter, which is named.
        """
        self._forget_state()
        sketches: dict[Matrix, Any] = {}
        for param, tree in state.items():
            if tree:
                sketches |= Family(param, self._of[param], self._note).to_owners(tree)
        if self._in_shards:
            buckets = [bucket for bucket in self._buckets if not bucket.stays]
            self._scatter({bucket: [m for m in bucket.matrices if m in sketches] for bucket in buckets}, sketches)
        self._show({matrix.param for matrix in sketches})

    def _forget_state(self) -> None:
        self.state.clear()
        for matrix, inner in self._kept:
            matrix.keep(None)
            if inner is not None:
                inner.state.clear()


# ---- arguments


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a param group."""
    return {name: value for name, value in group.items() if name != "params"}


def _check_arguments(state: str, bucket_bytes: int) -> None:
    if state not in (OWNER, SHARDS):
        raise ShardConfigValueError(f"state: must be {OWNER!r} or {SHARDS!r}, got {state!r}")
    if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise ShardConfigValueError(f"bucket_bytes: must be a positive int, got {bucket_bytes!r}")


def _named(params: nn.Module | Iterable[Any]) -> tuple[dict[torch.Tensor, str], list[Any]]:
    """Names of parameters, as far as they are given, and what torch's `Optimizer` is to be given."""
    if isinstance(params, nn.Module):
        params = list(params.named_parameters())
    given = [params] if isinstance(params, torch.Tensor) else list(params)
    names: dict[torch.Tensor, str] = {}

    def unnamed(each: Any) -> Any:
        if isinstance(each, tuple):
            name, param = each
            names[param] = name
            return param
        return each

    groups: list[Any] = []
    for each in given:
        if isinstance(each, dict):
            members = [each["params"]] if isinstance(each["params"], torch.Tensor) else list(each["params"])
            groups.append({**each, "params": [unnamed(member) for member in members]})
        else:
            groups.append(unnamed(each))
    return names, groups


def _defaults(kind: Make, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an optimizer of this kind.

    Raises:
        ShardConfigTypeError: it makes none, or one whose step needs a closure.
        ShardConfigValueError: it is to be differentiated through.
    """
    made = kind([nn.Parameter(torch.empty(2, 2, device="meta"))], **options) if callable(kind) else None
    if not isinstance(made, Optimizer):
        raise ShardConfigTypeError(f"kind: must be a class of torch.optim.Optimizer, or make one; got {kind!r}")
    check_steps_once("kind", made)
    if made.defaults.get("differentiable"):
        raise ShardConfigValueError(f"differentiable: the step of {title_of(kind)} goes over ranks; leave it False")
    return {name: value for name, value in made.param_groups[0].items() if name not in ("params", "param_names")}


def _matrix(name: str, param: torch.Tensor, route: Route) -> Matrix:
    whole = None
    if route.is_owner:
        whole = _parameter(stand_in(route.shape, param.dtype, route.layout.device))
    return Matrix(name, param, route, route.stays_at is not None, whole)


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=tensor.is_floating_point() or tensor.is_complex())


def _check_dtypes(matrices: Sequence[Matrix]) -> None:
    for matrix in matrices:
        if matrix.whole is not None and matrix.whole.dtype != matrix.param.dtype:
            raise ShardConfigStateError(
                f"parameter {matrix.name}: was {matrix.whole.dtype} when its optimizer was made, and is "
                f"{matrix.param.dtype}; make the optimizer after the model is converted"
            )


def _as_given(loaded: Any, given: Any) -> Any:
    """State in the dtypes in which it was given: torch casts it to those of parameters."""

    def leaf_of(path: Path, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        try:
            before = leaf_at(given, path)
        except (KeyError, IndexError, TypeError):  # a hook has changed it
            return leaf
        casted = isinstance(before, torch.Tensor) and before.dtype != leaf.dtype and before.shape == leaf.shape
        return before.detach() if casted and path[-1:] != ("step",) else leaf

    return mapped(loaded, leaf_of)
