"""`owned`: an optimizer that steps each full matrix on one owner rank, while parameters are sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from .._comm.own_groups import next_number
from .._faults.watch import WATCHER
from .._group.param import SHARDED_IN
from .._torch.core import never_trace
from ..errors import ComposableShardError, ShardConfigStateError, ShardConfigTypeError, ShardConfigValueError
from ._checks import IN_PARTS, check_steps_once, check_takes_dense, title_of
from ._layout import Layout, Route
from ._matrices import Blocks, Bucket, Matrix, Owners, blocks_by_name, in_buckets, routes_of
from ._rounds import Round, run, stand_in
from ._sharded_state import Family, Kept
from ._state import Path, leaf_at, mapped, sketched

BUCKET_BYTES = 64 << 20
OWNER, SHARDS = "owner", "shards"
Make = Callable[..., Optimizer]
State = dict[torch.Tensor, Any]
Shape = tuple[int, ...]
_TWO_OPTIMIZERS = (
    "pass only the matrices to `owned`, and all other parameters to a separate optimizer: "
    "[(name, p) for name, p in model.named_parameters() if p.ndim == 2]"
)


def owned(
    kind: Make,
    params: nn.Module | Iterable[Any],
    *,
    state: str = OWNER,
    blocks: Mapping[str, Blocks] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    **options: Any,
) -> Owned:
    """Make an optimizer for sharded parameters from any optimizer class that needs full matrices.

        matrices = [(n, p) for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
        muon = cs.optim.owned(torch.optim.Muon, matrices, lr=0.02, blocks={"*.qkv.weight": cs.optim.Blocks(64)})
        others = {id(p) for _, p in matrices}
        adamw = torch.optim.AdamW([p for p in model.parameters() if id(p) not in others])

    Each matrix has an owner, which is one of the ranks over which it is sharded. In a step, the owner receives the
    other ranks' parts of the gradient and the value, steps the full matrix with the given optimizer, and sends the
    values back. Each matrix product is therefore computed on one rank only, instead of on every rank.

    All ranks choose the same owners without communication. If only one rank holds a matrix, it is the owner. The other
    matrices are assigned in order of decreasing cost, each to the rank with the lowest total cost. The cost is the
    number of elements times the smaller dim, which is proportional to the FLOPs of a Newton-Schulz iteration.

    A matrix is one of the following:

    - a 2D parameter
    - each matrix of a 3D parameter, for example of experts
    - each block of rows, if `blocks` splits the parameter

    Parameters of other shapes are stepped as a whole. With replicas (HSDP), each replica does the same separately. With
    tensor parallelism, a matrix is assembled over all mesh axes that shard it.

    Args:
        kind: optimizer class, or a function that makes an optimizer from a list of param groups and `options`. The
            optimizer must store its state by parameter and must not need a closure.
        params: a sharded model, parameters with or without names (``(name, parameter)``), or param groups of these.
        state: where the optimizer's state is between steps. ``"owner"``: full, on the owner. ``"shards"``: sharded like
            the matrices, and sent to the owner and back in every step.
        blocks: how to split the rows of parameters into matrices, by parameter name or `fnmatch` pattern.
        bucket_bytes: maximum bytes of full matrices that one rank receives in one exchange. A larger matrix is sent
            alone. A step needs up to eight times as much memory: values and gradients of the current bucket, send and
            receive buffers of the next bucket, and values of the previous bucket.
        options: options of `kind`.

    Raises:
        ShardConfigTypeError: `kind` makes no optimizer, or one whose step needs a closure or sparse gradients.
        ShardConfigValueError: `kind` does not accept a parameter, a placement of one is neither a sharding nor a
            replication, or an argument is invalid. The message names it.
    """
    return Owned(kind, params, state=state, blocks=blocks, bucket_bytes=bucket_bytes, **options)


class Owned(Optimizer):
    """The optimizer that `owned` returns, with the same arguments. Works with schedulers and checkpoints.

    `state_dict` and `load_state_dict` are collectives: all ranks must call them. A state dict contains DTensors with
    the placements of their parameters, so it can be loaded on any number of ranks. `state` has this rank's part of it.

    Attributes:
        sent_bytes: bytes that this rank sent to other ranks in the last step.
    """

    def __init__(
        self,
        kind: Make,
        params: nn.Module | Iterable[Any],
        *,
        state: str = OWNER,
        blocks: Mapping[str, Blocks] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        **options: Any,
    ) -> None:
        _check_arguments(state, bucket_bytes)
        self._make, self._options, self._in_shards = kind, options, state == SHARDS
        self._bucket_bytes, self._owners = bucket_bytes, Owners()
        self._names, groups = _named(params)
        self._blocks = blocks_by_name([*self._names.values()], blocks or {})
        self._kept: list[Kept] = []
        self._of: dict[torch.Tensor, list[Kept]] = {}
        self._buckets: list[Bucket] = []
        self._number = 0
        self.sent_bytes = 0
        super().__init__(groups, _defaults(kind, options))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to step. All ranks must add the same ones.

        Raises:
            ShardConfigValueError: as in `owned`.
        """
        super().add_param_group(param_group)
        try:
            self._take(len(self.param_groups) - 1)
        except BaseException:
            self.param_groups.pop()
            raise

    def _take(self, index: int) -> None:
        """Assign owners and buckets to the matrices of a param group."""
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
        """The parameter and the route of each matrix, by name. Checks that the optimizer accepts all of them."""
        param_of: dict[str, torch.Tensor] = {}
        routes: dict[str, Route] = {}
        kinds: dict[tuple[Shape, torch.dtype], str] = {}
        for position, param in enumerate(params):
            name = self._name_of(param, index, position)
            own = routes_of(name, param, self._blocks.get(name))
            if not own.keys().isdisjoint(routes):  # without names from the user, equal layers have equal names
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
        """Check on all ranks that the optimizer accepts parameters of these shapes and dtypes.

        Raises:
            ShardConfigTypeError: it accepts only sparse gradients.
            ShardConfigValueError: it rejects one. The message names the first such parameter.
        """
        for (shape, dtype), name in kinds.items():
            param = _parameter(torch.empty(shape, dtype=dtype, device="meta"))
            try:
                check_takes_dense(name, self._make([{**options, "params": [param]}], **self._options))
            except ShardConfigTypeError:
                raise
            except Exception as error:
                raise ShardConfigValueError(
                    f"parameter {name}: {title_of(self._make)} does not accept it, with shape {shape} and {dtype}: "
                    f"{error}; {_TWO_OPTIMIZERS}"
                ) from error

    def __getstate__(self) -> dict[str, Any]:
        raise ShardConfigStateError(
            "an optimizer of `owned` has process groups and cannot be copied or pickled; make another one, and load "
            "its state_dict"
        )

    # ---- a step

    @never_trace
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all matrices that have a gradient.

        This is a collective: all ranks must call it, and the same matrices must have gradients on all ranks.

        Args:
            closure: computes the loss and the gradients. Called once, before any communication.

        Returns:
            The result of the closure.

        Raises:
            ShardConfigStateError: a gradient is not sharded like its parameter, the dtype of a parameter has changed,
                or the optimizer stores state outside of the state of parameters.
            RankMismatchError: other ranks step other matrices. Nothing was sent.
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
        """The rounds of a step: one for each bucket in which a matrix has a gradient."""
        stepped = [(bucket, bucket.stepped()) for bucket in self._buckets]
        for _, matrices in stepped:
            _check_dtypes(matrices)
        return [Round(bucket, matrices, self._note) for bucket, matrices in stepped if matrices]

    @property
    def _note(self) -> str:
        return f"{title_of(self._make)} {self._number}"

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Report an error of this rank to the other ranks, which would otherwise wait for it."""
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
        """One layout for each process group over which matrices are sharded, in the same order on all ranks."""
        return list({bucket.group: bucket.layout for bucket in self._buckets if bucket.group is not None}.values())

    def _show(self, params: Iterable[torch.Tensor]) -> None:
        """Set the entries of `state` to this rank's parts of the state of these parameters."""
        for param in params:
            shown = [kept.shown() for kept in self._of[param]]
            if len(shown) == 1:
                self.state[param] = shown[0]
            else:
                self.state[param] = {f"{i}.{key}": value for i, held in enumerate(shown) for key, value in held.items()}

    # ---- state as shards

    def _first_to_shards(self, rounds: Sequence[Round]) -> None:
        """Send state that was created in this step to the shards."""
        new = {each.bucket: [matrix for matrix in each.matrices if matrix.sketch is None] for each in rounds}
        if any(new.values()):
            sketches = self._agreed_sketches()
            self._scatter(new, {matrix: sketches.get(matrix, {}) for matrices in new.values() for matrix in matrices})

    def _scatter(self, matrices: Mapping[Bucket, Sequence[Matrix]], sketches: Mapping[Matrix, Any]) -> None:
        """Send the state of matrices from their owners to the shards.

        Args:
            matrices: matrices of each bucket.
            sketches: sketch of the state of each matrix.
        """
        for bucket, some in matrices.items():
            for matrix in some:
                matrix.keep(sketches[matrix])
            if some:
                Round(bucket, some, self._note).scatter_state()

    def _agreed_sketches(self) -> dict[Matrix, Any]:
        """The sketch of the state of each matrix that has state, gathered from the owners. A collective."""
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
        """Return the state of all ranks as DTensors. A collective: all ranks must call it.

        State tensors of the matrices' shape are returned in the parameter's shape, with its placements. Other state
        tensors are sharded along their first dim. If the parameter has several matrices, they have an additional first
        dim with one entry per matrix.

        Raises:
            ShardConfigStateError: matrices of one parameter have different states, for example step counts.
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
        """Load the result of `state_dict`, from any number of ranks. A collective: all ranks must call it.

        Args:
            state_dict: its tensors are DTensors on the meshes of their parameters, or full tensors that are equal on
                all ranks.

        Raises:
            ShardConfigValueError: state does not match its parameter. The message names the parameter.
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
        """Return the state by parameter, as in a state dict. A collective: all ranks must call it.

        Raises:
            ShardConfigStateError: as in `state_dict`.
        """
        sketches = self._agreed_sketches()
        state: State = {}
        for param, members in self._of.items():
            of_matrices = [sketches.get(kept.matrix) for kept in members]
            if any(each != of_matrices[0] for each in of_matrices):
                raise ShardConfigStateError(
                    f"parameter {members[0].matrix.name}: its matrices have different states, such as step counts, "
                    "which a state dict cannot represent"
                )
            if of_matrices[0] is not None:
                state[param] = Family(param, members, self._note).to_shards(of_matrices[0])
        return state

    def put_sharded_state(self, state: Mapping[torch.Tensor, Any]) -> None:
        """Replace all state by a result of `sharded_state`. A collective: all ranks must call it.

        Raises:
            ShardConfigValueError: state does not match its parameter. The message names the parameter.
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
    """The given names of parameters, and the parameters or param groups to pass to torch's `Optimizer`."""
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
        ShardConfigTypeError: `kind` makes no optimizer, or one whose step needs a closure.
        ShardConfigValueError: the option `differentiable` is set.
    """
    made = kind([nn.Parameter(torch.empty(2, 2, device="meta"))], **options) if callable(kind) else None
    if not isinstance(made, Optimizer):
        raise ShardConfigTypeError(f"kind: must be a torch.optim.Optimizer class, or make an optimizer; got {kind!r}")
    check_steps_once("kind", made)
    if made.defaults.get("differentiable"):
        raise ShardConfigValueError(
            f"differentiable: must be False, because the step of {title_of(kind)} communicates between ranks"
        )
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
                f"parameter {matrix.name}: was {matrix.whole.dtype} when its optimizer was made, but is "
                f"{matrix.param.dtype} now; make the optimizer after the model is converted"
            )


def _as_given(loaded: Any, given: Any) -> Any:
    """Restore the saved dtypes of loaded state, which torch casts to the dtypes of parameters."""

    def leaf_of(path: Path, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        try:
            before = leaf_at(given, path)
        except (KeyError, IndexError, TypeError):  # a hook has changed the state
            return leaf
        casted = isinstance(before, torch.Tensor) and before.dtype != leaf.dtype and before.shape == leaf.shape
        return before.detach() if casted and path[-1:] != ("step",) else leaf

    return mapped(loaded, leaf_of)
