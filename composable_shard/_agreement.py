"""Whether all ranks have the same plan: asked before the first payload moves, so that it is an error, and no hang."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from ._errors import RankMismatchError
from ._mesh import MeshInfo
from ._plan import ShardPlan
from ._torch import without_dispatch_modes
from ._torch_distributed import all_gather_options, all_reduce_options, backend_name
from ._transports import SIMULATED

Among = Sequence[
    tuple[dist.ProcessGroup, torch.device, frozenset[str]]
]  # with its device, and whose parameters it moves


def groups_of(meshes: Iterable[tuple[str, MeshInfo]]) -> Among:
    """The process groups over which groups of parameters, by FQN, are sharded, each once; not those of one rank.

    Replicas are not among them: each may run a forward, or have transports, of its own. Nor are simulated worlds, which
    notice by themselves when ranks differ.
    """
    found: dict[int, tuple[dist.ProcessGroup, torch.device, set[str]]] = {}
    for fqn, info in meshes:
        there = info.shard_group
        if there is not None and there.size() > 1 and backend_name(there, info.device) not in SIMULATED:
            found.setdefault(id(there), (there, info.device, set()))[2].add(fqn)
    return [(group, device, frozenset(fqns)) for group, device, fqns in found.values()]


def agree(plan: ShardPlan, among: Among) -> None:
    """See that all ranks of some process groups have the same plan of the parameters there. A collective in each.

    Raises:
        RankMismatchError: on all ranks of the first group in which plans differ; it names two ranks, and what is
            otherwise on the second.
    """
    for group, device, fqns in among:
        part = plan.part(fqns)
        own = torch.frombuffer(bytearray.fromhex(part.digest), dtype=torch.uint8)
        with torch.inference_mode(False), torch.no_grad(), without_dispatch_modes():
            there = own.to(device)
            found = there.repeat(group.size())  # a simulated process group may move nothing
            group._allgather_base(found, there, all_gather_options()).wait()
            digests = found.view(group.size(), -1)
            differ = (digests != digests[:1]).any(dim=1).nonzero().flatten().tolist()
        if differ:
            raise _mismatch(part, group, differ)


def slowest(seconds: Sequence[float], groups: Sequence[tuple[dist.ProcessGroup, torch.device]]) -> list[float]:
    """For each of some measured times, that of the slowest rank of some process groups, so that all decide alike."""
    found = torch.tensor(seconds, dtype=torch.float64)
    with torch.inference_mode(False), torch.no_grad(), without_dispatch_modes():
        for group, device in [*groups] * len(groups):  # so that what one has found goes along the others
            there = found.to(device)
            group.allreduce([there], all_reduce_options(dist.ReduceOp.MAX)).wait()
            found = there.cpu()
    agreed: list[float] = found.tolist()
    return agreed


def _mismatch(plan: ShardPlan, group: dist.ProcessGroup, differ: list[int]) -> RankMismatchError:
    """The error, in the same words on all ranks."""
    texts: list[str] = [""] * group.size()
    dist.all_gather_object(texts, plan.to_json(), group)
    plans = [ShardPlan.from_json(text) for text in texts]
    ranks = dist.get_process_group_ranks(group)
    first, other = ranks[0], ranks[differ[0]]
    lines = plans[0].diff(plans[differ[0]]).splitlines()
    many = "" if len(differ) == 1 else f" (and {len(differ) - 1} more ranks differ from rank {first})"
    return RankMismatchError(
        f"ranks {first} and {other} have different plans{many}: {lines[0] if lines else 'they differ'}. Build and "
        "shard the model alike on all ranks; print(make_plan(model)) shows what each rank has"
    )
