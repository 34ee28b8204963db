"""Build the engines that the benchmarks compare.

Every engine gets the same model from the same seed. Sharding engines shard each block and the root, with the defaults
of their library.
"""

import argparse
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

Build = Callable[[nn.Module, type[nn.Module], DeviceMesh], nn.Module]


def _plain(model: nn.Module, _block: type[nn.Module], _mesh: DeviceMesh) -> nn.Module:
    return model


class _UnderHooks(nn.Module):
    """A model under saved-tensor hooks that change nothing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> Any:
        with saved_tensors_hooks(_as_it_is, lambda saved: saved):
            return self.model(*inputs)


def _as_it_is(saved: torch.Tensor) -> torch.Tensor:
    return (
        saved.detach() if saved.requires_grad else saved
    )  # saving an operator's output would create a reference cycle


def _under_hooks(model: nn.Module, _block: type[nn.Module], _mesh: DeviceMesh) -> nn.Module:
    return _UnderHooks(model)


def _per_block(shard: Callable[..., object], model: nn.Module, block: type[nn.Module], mesh: DeviceMesh) -> nn.Module:
    for child in list(model.modules()):
        if isinstance(child, block):
            shard(child, mesh=mesh)
    shard(model, mesh=mesh)
    return model


def load(name: str) -> None:
    """Import the library of ours, so that the import does not count as start-up."""
    if name.startswith("ours"):
        import composable_shard  # noqa: F401


def _ours(model: nn.Module, block: type[nn.Module], mesh: DeviceMesh) -> nn.Module:
    import composable_shard  # not imported when other engines are measured

    return _per_block(composable_shard.fully_shard, model, block, mesh)


def _ours_none_ahead(model: nn.Module, block: type[nn.Module], mesh: DeviceMesh) -> nn.Module:
    """Ours without prefetching."""
    import composable_shard

    built = _ours(model, block, mesh)
    for module in built.modules():
        if isinstance(module, composable_shard.FSDPModule):
            module.set_modules_to_forward_prefetch([])
            module.set_modules_to_backward_prefetch([])
    return built


def _ours_unwatched(model: nn.Module, block: type[nn.Module], mesh: DeviceMesh) -> nn.Module:
    """Ours without comparing the actions of ranks."""
    from composable_shard._faults import seat

    built: Any = _ours(model, block, mesh)
    with mock.patch.object(seat, "_ledgers", return_value=()):
        built.unshard()  # creates the engine
    built.reshard()
    return built


def _ours_torch_collectives(model: nn.Module, block: type[nn.Module], mesh: DeviceMesh) -> nn.Module:
    """Ours with the collectives that FSDP2 uses."""
    built: Any = _ours(model, block, mesh)
    with mock.patch.dict(os.environ, COMPOSABLE_SHARD_TRANSPORT="torch"):
        built.unshard()  # creates the engine, which chooses the collectives of each group
    built.reshard()
    return built


def _fsdp2(model: nn.Module, block: type[nn.Module], mesh: DeviceMesh) -> nn.Module:
    return _per_block(fully_shard, model, block, mesh)


def _fsdp1(model: nn.Module, block: type[nn.Module], mesh: DeviceMesh) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it recommends an accelerator, and in newer versions FSDP2
        return FullyShardedDataParallel(
            model,
            process_group=mesh.get_group(),
            auto_wrap_policy=ModuleWrapPolicy({block}),
            use_orig_params=True,
            device_id=torch.device(mesh.device_type),
        )


def _ddp(model: nn.Module, _block: type[nn.Module], mesh: DeviceMesh) -> nn.Module:
    # All ranks use the same seed, so there is nothing to synchronize. The no-op backend could not do it.
    return DistributedDataParallel(model, process_group=mesh.get_group(), init_sync=False)


COMPILED = "ours-compiled"  # prefix of compiled engines of `shard_units`
FSDP2_MEMORY = 1 / 0.754  # the runtime's bytes of FSDP2 over ours, one group prefetched (memory.py, 150M)


def shard_units(name: str, model: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh) -> nn.Module:
    """Shard a model and the given modules (in forward order) with ours (`ours...`) or FSDP2.

    - `ours-two` allows two reductions in flight, as on an accelerator. On a CPU the default waits for reductions before
      it gathers in backward.
    - `ours-far` also prefetches two groups.
    - `ours-auto` measures the second and third step and schedules by these times, in the memory of one prefetched group
      if reductions keep their buffers until they end, as on a CPU.
    - `ours-auto-fsdp2` does the same in FSDP2's memory, by the figures of memory.py.
    - `ours-auto-whole` does the same with memory for all parameters and all reductions.
    - `ours-compiled...` is compiled after its first steps (`compiled_whole`), with a policy for graphs: one prefetched
      group, two (`-far`), two in the memory of one (`-budget`), or `auto` in the memory of `ours-auto` or
      `ours-auto-fsdp2`.
    """
    import composable_shard

    shard = composable_shard.fully_shard if name.startswith("ours") else fully_shard
    for unit in units:
        shard(unit, mesh=mesh)
    shard(model, mesh=mesh)
    measures = "-auto" in name
    if name in ("ours-two", "ours-far") or name.startswith(COMPILED) or measures:
        model.set_reduce_scatter_max_input_buffers(2)  # type: ignore[operator]
    if name.startswith(COMPILED):
        ahead = composable_shard.PrefetchPolicy.depth(1 if name == COMPILED else 2)
        model.set_prefetch_policy(ahead)  # type: ignore[operator]
    if measures:
        model.set_prefetch_policy(composable_shard.PrefetchPolicy.auto())  # type: ignore[operator]
    if measures or name.endswith("-budget"):
        plan = composable_shard.make_plan(model).with_policies(composable_shard.PrefetchPolicy.depth(1))
        plan = replace(plan, groups=tuple(replace(group, frees_queued=False) for group in plan.groups))
        share = FSDP2_MEMORY if name.endswith("-auto-fsdp2") else 1.0
        whole = 2 * sum(group.unsharded_bytes + group.sizes.landing for group in plan.groups)
        budget = whole if name == "ours-auto-whole" else int(share * plan.peak_bytes)
        model.set_pool_policy(composable_shard.PoolPolicy(budget=budget))  # type: ignore[operator]
    for at, unit in enumerate(units if name == "ours-far" else ()):
        unit.set_modules_to_forward_prefetch(units[at + 1 : at + 3])  # type: ignore[operator]
        unit.set_modules_to_backward_prefetch(units[max(0, at - 2) : at][::-1])  # type: ignore[operator]
    return model


def compiled_whole(model: nn.Module) -> nn.Module:
    """Compile a model that has run, as one graph for forward and one for backward, without generating kernels."""
    return placed(model, "aot_eager")


def placed(model: nn.Module, backend: str) -> nn.Module:
    """Compile a model of ours with `composable_shard.compile`, which schedules the communication in the graphs."""
    import composable_shard

    return composable_shard.compile(model, backend=backend)


def compile_blocks(model: nn.Module, block: type[nn.Module], backend: str, dynamic: bool | None = None) -> None:
    """Compile each block of a model in place. Call this before sharding.

    With `dynamic=False`, each sequence length gets its own kernels.
    """
    for child in model.modules():
        if isinstance(child, block):
            child.compile(fullgraph=True, dynamic=dynamic, backend=backend)


ENGINES: dict[str, Build] = {
    "plain": _plain,
    "plain-under-hooks": _under_hooks,
    "single": _plain,
    "compute": _plain,
    "ours": _ours,
    "ours-none-ahead": _ours_none_ahead,
    "ours-unwatched": _ours_unwatched,
    "ours-torch-collectives": _ours_torch_collectives,
    "fsdp2": _fsdp2,
    "fsdp2-again": _fsdp2,
    "fsdp1": _fsdp1,
    "ddp": _ddp,
    "ours-whole": _ours,
    "ours-placed-whole": _ours,
    "ours-blocks": _ours,
    "fsdp2-blocks": _fsdp2,
    "compute-whole": _plain,
}
WHOLE, PLACED, BLOCKS = "-whole", "-placed-whole", "-blocks"  # suffixes of compiled engines


def build(
    name: str, model: nn.Module, block: type[nn.Module], mesh: DeviceMesh, backend: str = "inductor"
) -> nn.Module:
    """Build the engine with this name around `model`.

    - `-whole`: compiled by `torch.compile` as one graph for forward and one for backward
    - `-placed-whole`: compiled by `composable_shard.compile`, which schedules the communication
    - `-blocks`: each block is compiled in place before the model is sharded
    """
    if name.endswith(BLOCKS):
        compile_blocks(model, block, backend)
    built = ENGINES[name](model, block, mesh)
    if name.endswith(PLACED):
        return placed(built, backend)
    return torch.compile(built, fullgraph=True, backend=backend) if name.endswith(WHOLE) else built


def parse(text: str, others: Sequence[str] = ()) -> list[str]:
    """Parse a comma-separated list of engines, or names in `others`."""
    known = [*ENGINES, *others]
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown engine {', '.join(unknown)}; known: {', '.join(known)}")
    return names
