"""Save compiled code to a file in one process, and load it in others after a check that it fits their model."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._graph.operators import CODE
from .._module.build import bound_of
from .._module.module import FSDPModule
from .._module.status import make_plan, sharded_states
from .._plan.group_plan import GroupPlan
from .._plan.plan import ShardPlan
from .._plan.text import group_changes
from ..errors import ArtifactMismatchError, ShardConfigStateError, ShardConfigValueError

_BEGIN = b"composable_shard cache artifacts 1\n"


def save_cache_artifacts(model: nn.Module, path: str | os.PathLike[str]) -> int:
    """Save the compiled code of this process to a file, from which other processes fill their compile caches.

    Call it after a forward and a backward of the compiled model. It issues no collective, so one rank may call it
    alone. The process can also be one rank of a simulated world (`composable_shard.testing.fake`). Then no process of
    the real job has to compile. The file contains a header, by which `load_cache_artifacts` checks that the file fits,
    and the result of `torch.compiler.save_cache_artifacts`, which covers everything that the process has compiled.

    Args:
        model: the sharded model, compiled or not.
        path: path of the file. An existing file is replaced atomically.

    Returns:
        size of the file in bytes.

    Raises:
        ShardConfigValueError: the model contains no sharded module.
        ShardConfigStateError: nothing was compiled, or nothing that can be cached.
    """
    made = torch.compiler.save_cache_artifacts()
    if made is None:
        raise ShardConfigStateError(
            "save_cache_artifacts: this process has compiled nothing that can be cached; first run a forward and a "
            "backward of the compiled model, with a backend that caches (inductor, not aot_eager) and caches enabled"
        )
    payload = made[0]
    header = json.dumps(_about(model) | {"payload": hashlib.sha256(payload).hexdigest()}).encode()
    whole = b"".join((_BEGIN, len(header).to_bytes(8, "big"), header, payload))
    beside = Path(f"{os.fspath(path)}.{uuid.uuid4().hex}")
    beside.write_bytes(whole)
    beside.replace(path)
    return len(whole)


def load_cache_artifacts(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Fill the compile caches of this process from a file of `save_cache_artifacts`, if it was made for this model.

    Call it after the model is sharded and materialized and all policies are set, and before the model is compiled. The
    first step then traces the model and takes the compiled code from the caches. The file contains pickled code, so
    only load files that you trust.

    Args:
        model: the sharded model, compiled or not.
        path: path of the file.

    Raises:
        ShardConfigValueError: the model contains no sharded module, or the file is incomplete or was not written by
            `save_cache_artifacts`.
        ArtifactMismatchError: the file was made with other versions of torch, Python or this library, on another
            device, or for another model, plan or shapes of the shards. The error lists the differences. Nothing is
            loaded; the model can still be compiled.
    """
    content = Path(path).read_bytes()
    begin, size = len(_BEGIN), len(_BEGIN) + 8
    end = size + int.from_bytes(content[begin:size], "big")
    header, payload = content[size:end], content[end:]
    saved = json.loads(header) if content.startswith(_BEGIN) and len(header) == end - size else {}
    if saved.get("payload") != hashlib.sha256(payload).hexdigest():
        raise ShardConfigValueError(
            f"path: {os.fspath(path)} is incomplete, or was not written by save_cache_artifacts; save it again"
        )
    if differences := tuple(_differences(_about(model), saved)):
        raise ArtifactMismatchError(os.fspath(path), differences)
    if torch.compiler.load_cache_artifacts(payload) is None:
        raise ShardConfigValueError(f"path: torch cannot read the artifacts in {os.fspath(path)}; save them again")


def _about(model: nn.Module) -> dict[str, Any]:
    """Describe everything that the compiled code of a model depends on, for this rank."""
    model = getattr(model, "_orig_mod", model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            bound_of(module, agrees=False, runs=False)  # type: ignore[arg-type]  # graphs follow the engine's schedule
    states = sharded_states(model)
    device = states[0].declaration.info.device
    on_card = device.type == "cuda"
    return {
        "torch": torch.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "composable_shard": CODE,
        "device": torch.cuda.get_device_name(device) if on_card else f"{device.type} {platform.machine()}",
        "modules": str(model),
        "plan": make_plan(model).to_json(),
        "schedule": " ".join(state.asked.schedule for state in states if state.asked.schedule),
        "pieces": {", ".join(param.fqn for param in state.declaration.params): state.traced.key for state in states},
        "rank": states[0].declaration.info.shard_rank,
    }


def _differences(here: dict[str, Any], saved: dict[str, Any]) -> Iterator[str]:
    """Yield the differences between two descriptions, in words. For plans and models, yield only the first one."""
    for name in ("torch", "Python", "composable_shard", "device"):
        if here[name] != saved[name]:
            yield f"{name}: {here[name]} here, {saved[name]} in the file"
    if here["composable_shard"] != saved["composable_shard"]:
        return  # plans of another version may be unreadable, and the keys of pieces depend on the code
    if changes := group_changes(*(_groups(each["plan"]) for each in (saved, here))):
        yield f"plan, from the file to this model: {changes[0]}"
    elif here["schedule"] != saved["schedule"]:
        yield "schedule: policies, budgets or lists of modules to prefetch differ from those of the file"
    elif here["modules"] != saved["modules"]:
        lines = (each["modules"].splitlines() for each in (here, saved))
        one, two = next((one, two) for one, two in itertools.zip_longest(*lines, fillvalue="nothing") if one != two)
        yield f"modules: {one.strip()} here, {two.strip()} in the file"
    elif strange := [names for names, key in here["pieces"].items() if saved["pieces"].get(names) != key]:
        yield (
            f"pieces of {strange[0]}: on rank {here['rank']} (this rank) they have other shapes or dtypes than on rank "
            f"{saved['rank']}, which compiled; ranks with uneven pieces need separate files"
        )


def _groups(plan: str) -> list[GroupPlan]:
    """The groups of a plan without the attributes of their transports, on which graphs do not depend."""
    groups = ShardPlan.from_json(plan).groups
    return [replace(group, route=None, reduces_first=False, frees_queued=False) for group in groups]
