"""Rows for torch.distributed.checkpoint: its state dict functions with every option, and its file formats.

Each row loads the saved state into another model. Both models must then have equal weights and train identically.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _transformer import EVEN, UNEVEN, Config, evaluate, shard, train, transformer, whole
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    format_utils,
    staging,
)
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from _rows import Rows, Run

rows = Rows("torch.distributed.checkpoint", environment="torch", versions=("torch",))

TIED = Config(tied=True)
ON_ALL, FROM_FIRST = {"full_state_dict": True}, {"full_state_dict": True, "broadcast_from_rank0": True}


def started(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, amsgrad=True)


def trained(run: Run, config: Config = UNEVEN, frozen: bool = False, **settings: Any) -> tuple[Any, Any]:
    """Train a sharded model for two steps; return it and its optimizer."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = transformer(config)
    if frozen:
        model.blocks[0].requires_grad_(False)
    shard(model, **settings)
    optimizer = started(model)
    train(model, optimizer, run.rank, range(2))
    run.sharded(model)
    return model, optimizer


def other(config: Config = UNEVEN, frozen: bool = False, seed: int = 1, **settings: Any) -> tuple[Any, Any]:
    """Return a sharded model with other weights, and a new optimizer."""
    torch.manual_seed(seed)
    model = transformer(config)
    with torch.no_grad():
        for p in model.parameters():
            if not frozen or not any(p is q for q in model.blocks[0].parameters()):
                p.add_(0.5)
    if frozen:
        model.blocks[0].requires_grad_(False)
    shard(model, **settings)
    return model, started(model)


def alike(run: Run, model: Any, optimizer: Any, loaded: Any, its_optimizer: Any, name: str = "") -> None:
    """Check that both models have equal weights and train identically; record losses, weights and an evaluation."""
    run.agrees("loaded weights", whole(loaded), whole(model), 0.0)
    losses = [train(each, of, run.rank, range(2, 4)) for each, of in ((model, optimizer), (loaded, its_optimizer))]
    run.agrees("later losses", losses[1], losses[0], 0.0)
    run.agrees("later weights", whole(loaded), whole(model), 0.0)
    run.note(f"losses{name}", losses[0])
    run.weights(loaded, f"weights{name}")
    run.note(f"evaluation{name}", evaluate(loaded, run.rank))


def kinds(value: Any) -> Any:
    """Describe the types, shapes and placements in a state dict."""
    if isinstance(value, dict):
        return {str(key): kinds(each) for key, each in value.items()}
    if isinstance(value, DTensor):
        return f"DTensor {tuple(value.shape)} {value.placements} {tuple(value.to_local().shape)}"
    if isinstance(value, Tensor):
        return f"{type(value).__name__} {tuple(value.shape)} {value.dtype}"
    return [kinds(each) for each in value] if isinstance(value, list | tuple) else type(value).__name__


# ---- state dict functions


def round_trip(run: Run, get: dict[str, Any], put: dict[str, Any], config: Config = UNEVEN) -> None:
    frozen = bool(get.get("ignore_frozen_params"))
    model, optimizer = trained(run, config, frozen)
    states = dsd.get_state_dict(model, optimizer, options=StateDictOptions(**get))
    run.note("types", [kinds(each) for each in states])
    run.note("states", list(states))
    weights, moments = copy.deepcopy(states)
    loaded, its_optimizer = other(config, frozen)
    options = StateDictOptions(**put)
    if put.get("broadcast_from_rank0"):  # set_state_dict rejects empty states
        first = run.rank == 0
        found = dsd.set_model_state_dict(loaded, weights if first else {}, options=options)
        dsd.set_optimizer_state_dict(loaded, its_optimizer, moments if first else {}, options=options)
    else:
        found = dsd.set_state_dict(
            loaded, its_optimizer, model_state_dict=weights, optim_state_dict=moments, options=options
        )
    run.note("keys", [list(found.missing_keys), list(found.unexpected_keys)])
    alike(run, model, optimizer, loaded, its_optimizer)


PAIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    (ON_ALL, ON_ALL),
    (ON_ALL, FROM_FIRST),
    ({"cpu_offload": True}, {"cpu_offload": True}),
    (ON_ALL | {"cpu_offload": True}, FROM_FIRST),
    (ON_ALL | {"cpu_offload": True}, FROM_FIRST | {"cpu_offload": True}),
    ({"ignore_frozen_params": True}, {"strict": False}),
    (ON_ALL | {"ignore_frozen_params": True}, FROM_FIRST | {"strict": False}),
    ({"flatten_optimizer_state_dict": True}, {"flatten_optimizer_state_dict": True}),
    # torch accepts flat full states also without the option.
    (ON_ALL | {"flatten_optimizer_state_dict": True}, ON_ALL),
    (ON_ALL | {"flatten_optimizer_state_dict": True, "cpu_offload": True}, FROM_FIRST),
]


def words(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items()) or "no options"


for get, put in PAIRS:
    rows.add(f"get_state_dict ({words(get)}), set_state_dict ({words(put)})", partial(round_trip, get=get, put=put))
for get, put in (PAIRS[0], PAIRS[1], PAIRS[2], PAIRS[8]):
    program = partial(round_trip, get=get, put=put, config=TIED)
    rows.add(f"tied weights: get_state_dict ({words(get)}), set_state_dict ({words(put)})", program)


@rows("get_ and set_model_state_dict, get_ and set_optimizer_state_dict, one by one")
def one_by_one(run: Run) -> None:
    model, optimizer = trained(run)
    for get, put, name in (({}, {}, " sharded"), (ON_ALL, FROM_FIRST, " full")):
        weights = copy.deepcopy(dsd.get_model_state_dict(model, options=StateDictOptions(**get)))
        moments = copy.deepcopy(dsd.get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**get)))
        run.note(f"states{name}", [weights, moments])
        twin, of_twin = copy.deepcopy(weights), copy.deepcopy(moments)
        loaded, its_optimizer = other()
        first = run.rank == 0 or not put
        dsd.set_model_state_dict(loaded, twin if first else {}, options=StateDictOptions(**put))
        dsd.set_optimizer_state_dict(loaded, its_optimizer, of_twin if first else {}, options=StateDictOptions(**put))
        run.agrees("weights", whole(loaded), whole(model), 0.0)
        again = dsd.get_optimizer_state_dict(loaded, its_optimizer, options=StateDictOptions(**get))
        run.agrees("states", again, moments, 0.0)
    alike(run, model, optimizer, loaded, its_optimizer)


@rows("submodules=, with and without their prefixes")
def submodules(run: Run) -> None:
    model, optimizer = trained(run)
    for keep in (True, False):
        options = StateDictOptions(keep_submodule_prefixes=keep)
        part = model.blocks[1]
        weights = dsd.get_model_state_dict(model, submodules={part}, options=options)
        run.note(f"types {keep}", kinds(weights))
        loaded, _ = other()
        dsd.set_model_state_dict(
            loaded,
            model_state_dict={loaded.blocks[1]: weights} if not keep else copy.deepcopy(weights),  # type: ignore[dict-item]
            options=StateDictOptions(strict=False),
        )
        run.agrees("weights", whole(loaded.blocks[1]), whole(part), 0.0)
        run.weights(loaded, f"weights {keep}")
        moments = dsd.get_optimizer_state_dict(model, optimizer, submodules={part}, options=StateDictOptions())
        run.note(f"moments {keep}", moments)


@rows("strict=False with keys that are missing and in addition; strict=True is an error")
def strict(run: Run) -> None:
    model, _ = trained(run)
    for get in ({}, ON_ALL):
        weights = dsd.get_model_state_dict(model, options=StateDictOptions(**get))
        weights.pop("norm.weight")
        weights["novel.weight"] = torch.ones(3)
        loaded, _ = other()
        found = dsd.set_model_state_dict(loaded, dict(weights), options=StateDictOptions(strict=False, **get))
        run.note(f"keys {get}", [list(found.missing_keys), list(found.unexpected_keys)])
        run.weights(loaded, f"weights {get}")
        try:
            dsd.set_model_state_dict(loaded, dict(weights), options=StateDictOptions(**get))
        except RuntimeError as error:
            text = str(error)
            run.note(f"error {get}", ["norm.weight" in text, "novel.weight" in text])
        else:
            raise AssertionError("strict=True did not raise an error")


@rows("broadcast_from_rank0 into a model on the meta device, sharded before")
def from_meta(run: Run) -> None:
    model, optimizer = trained(run)
    weights, moments = dsd.get_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    with torch.device("meta"):
        loaded = shard(transformer())
    weights, moments = copy.deepcopy((weights, moments))  # both optimizers would share step counters
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dsd.set_model_state_dict(loaded, weights, options=options)
    run.note("devices", sorted({str(p.device) for p in loaded.parameters()}))
    its_optimizer = started(loaded)
    dsd.set_optimizer_state_dict(loaded, its_optimizer, moments, options=options)
    run.sharded(loaded, "sharded loaded")
    alike(run, model, optimizer, loaded, its_optimizer)


class Renamed(nn.Module):
    """An embedding whose hooks and `_fqn_modifiers` shorten the name of its weight in state dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.extra = nn.Embedding(13, 5), nn.Embedding(3, 5)
        self._register_state_dict_hook(Renamed._shorten)  # type: ignore[no-untyped-call]
        self._register_load_state_dict_pre_hook(self._lengthen)

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "embedding"}

    _names_of_mine = _fqn_modifiers

    def _shorten(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}embedding.weight")

    def _lengthen(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if f"{prefix}weight" in state:
            state[f"{prefix}embedding.weight"] = state.pop(f"{prefix}weight")

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) + self.extra(tokens % 3)


@rows("dsd_fqn_modifiers: names that hooks of the model change")
def modifiers(run: Run) -> None:
    dist.init_process_group("gloo")

    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        model = nn.Sequential(Renamed(), nn.Linear(5, 3))
        fully_shard(model[0])
        return fully_shard(model)

    model = make(0)
    run.sharded(model)
    for name in ("_fqn_modifiers", "_names_of_mine"):
        options = StateDictOptions(full_state_dict=True, dsd_fqn_modifiers=name)
        weights = dsd.get_model_state_dict(model, options=options)
        run.note(f"weights {name}", weights)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, dsd_fqn_modifiers=name)
        loaded = make(1)
        dsd.set_model_state_dict(loaded, weights if run.rank == 0 else {}, options=options)
        run.agrees("weights", whole(loaded), whole(model), 0.0)


class Counted(nn.Module):
    """A model with persistent and non-persistent buffers, a frozen parameter, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.norm, self.out = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)
        self.out.bias.requires_grad_(False)
        self.calls = 0
        self.register_buffer("unsaved", torch.ones(2), persistent=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.out(self.norm(self.inp(x)).relu())


def counted(run: Run, steps: int) -> tuple[Any, Any]:
    torch.manual_seed(steps)
    model = Counted()
    for layer in (model.inp, model.out):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + run.rank)
        model(torch.randn(4, 5, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@rows("buffers, frozen parameters and extra state, in memory and through files")
def extra(run: Run) -> None:
    dist.init_process_group("gloo")
    model, optimizer = counted(run, 3)
    run.sharded(model)
    for get in ({}, ON_ALL):
        options = StateDictOptions(**get)
        weights, moments = dsd.get_state_dict(model, optimizer, options=options)
        run.note(f"states {get}", [weights, moments])
        loaded, its_optimizer = counted(run, 0)
        dsd.set_state_dict(
            loaded,
            its_optimizer,
            model_state_dict=dict(weights),
            optim_state_dict=moments,
            options=StateDictOptions(**get),
        )
        assert loaded.calls == 3
        run.agrees("weights", whole(loaded), whole(model), 0.0)
    dcp.save({"model": model.state_dict()}, checkpoint_id=run.folder / "saved")
    loaded, _ = counted(run, 0)
    state = {"model": loaded.state_dict()}
    dcp.load(state, checkpoint_id=run.folder / "saved")
    loaded.load_state_dict(state["model"])
    assert loaded.calls == 3
    run.agrees("weights", whole(loaded), whole(model), 0.0)
    run.files(run.folder)


@rows("blocks in checkpoint_wrapper: names without its prefix")
def wrapped(run: Run) -> None:
    dist.init_process_group("gloo")

    def make() -> tuple[Any, Any]:
        model = transformer()
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda m: type(m).__name__ == "Block"
        )
        shard(model)
        return model, started(model)

    model, optimizer = make()
    run.sharded(model)
    train(model, optimizer, run.rank, range(2))
    weights, moments = dsd.get_state_dict(model, optimizer)
    run.note("states", [weights, moments])
    weights, moments = copy.deepcopy((weights, moments))
    loaded, its_optimizer = make()
    dsd.set_state_dict(loaded, its_optimizer, model_state_dict=weights, optim_state_dict=moments)
    alike(run, model, optimizer, loaded, its_optimizer)


@rows("a model in torch.compile: names without _orig_mod")
def of_compiled(run: Run) -> None:
    model, optimizer = trained(run)
    compiled = torch.compile(model, backend="eager")
    weights, moments = dsd.get_state_dict(compiled, optimizer)
    run.note("states", [weights, moments])
    weights, moments = copy.deepcopy((weights, moments))
    loaded, its_optimizer = other()
    dsd.set_state_dict(
        torch.compile(loaded, backend="eager"), its_optimizer, model_state_dict=weights, optim_state_dict=moments
    )
    alike(run, model, optimizer, loaded, its_optimizer)


@rows("an optimizer without a step yet, and several optimizers")
def several(run: Run) -> None:
    dist.init_process_group("gloo")

    def make() -> tuple[Any, list[Any]]:
        model = shard(transformer())
        first = torch.optim.SGD(model.blocks.parameters(), lr=0.05, momentum=0.9)
        rest = [*model.embed.parameters(), *model.norm.parameters(), *model.head.parameters()]
        return model, [first, torch.optim.AdamW(rest, lr=0.01)]

    model, optimizers = make()
    run.sharded(model)
    run.note("at first", dsd.get_optimizer_state_dict(model, optimizers))
    for optimizer in optimizers:
        optimizer.zero_grad()
    for _ in range(2):
        for optimizer in optimizers:
            train(model, optimizer, run.rank, range(1))
            for each in optimizers:
                each.zero_grad()
    weights, moments = dsd.get_state_dict(model, optimizers)
    run.note("states", [weights, moments])
    loaded, theirs = make()
    dsd.set_state_dict(loaded, theirs, model_state_dict=weights, optim_state_dict=copy.deepcopy(moments))
    run.agrees("weights", whole(loaded), whole(model), 0.0)
    run.agrees("states", dsd.get_optimizer_state_dict(loaded, theirs), moments, 0.0)


# ---- files


def states_of(model: Any, optimizer: Any) -> dict[str, Any]:
    weights, moments = dsd.get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def load_into(model: Any, optimizer: Any, state: dict[str, Any]) -> None:
    dsd.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def through_files(
    run: Run,
    save: Callable[[dict[str, Any], Path], Any],
    load: Callable[[dict[str, Any], Path], Any] | None = None,
    config: Config = UNEVEN,
    **settings: Any,
) -> None:
    model, optimizer = trained(run, config, **settings)
    folder = run.folder / "saved"
    save(states_of(model, optimizer), folder)
    dist.barrier()
    loaded, its_optimizer = other(config, **settings)
    state = states_of(loaded, its_optimizer)
    if load is None:
        dcp.load(state, checkpoint_id=folder)
    else:
        load(state, folder)
    load_into(loaded, its_optimizer, state)
    run.files(run.folder)
    run.note("names", sorted(path.name for path in folder.iterdir()))
    alike(run, model, optimizer, loaded, its_optimizer)


def writes(**settings: Any) -> Callable[[dict[str, Any], Path], Any]:
    return lambda state, folder: dcp.save(state, storage_writer=FileSystemWriter(folder, **settings))


def reads(**settings: Any) -> Callable[[dict[str, Any], Path], Any]:
    return lambda state, folder: dcp.load(state, storage_reader=FileSystemReader(folder, **settings))


SAVES: dict[str, Callable[[dict[str, Any], Path], Any]] = {
    "dcp.save, dcp.load": lambda state, folder: dcp.save(state, checkpoint_id=folder),
    "FileSystemWriter(single_file_per_rank=False)": writes(single_file_per_rank=False),
    "FileSystemWriter(thread_count=2, per_thread_copy_ahead=0, sync_files=False)": writes(
        thread_count=2, per_thread_copy_ahead=0, sync_files=False
    ),
    "DefaultSavePlanner(dedup_save_to_lowest_rank=True)": lambda state, folder: dcp.save(
        state, checkpoint_id=folder, planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    ),
    "DefaultSavePlanner(enable_plan_caching=True), saved twice": lambda state, folder: [
        dcp.save(state, checkpoint_id=folder, planner=DefaultSavePlanner(enable_plan_caching=True)) for _ in range(2)
    ],
}
for title, saves in SAVES.items():
    rows.add(title, partial(through_files, save=saves))
rows.add("tied weights through files", partial(through_files, save=SAVES["dcp.save, dcp.load"], config=TIED))


def on_replicas(run: Run, lowest: bool) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=lowest)
    through_files(run, lambda state, folder: dcp.save(state, checkpoint_id=folder, planner=planner), mesh=mesh)


for lowest in (False, True):
    rows.add(
        f"replicas of shards, saved with dedup_save_to_lowest_rank={lowest}",
        partial(on_replicas, lowest=lowest),
        world=4,
    )


@rows("a folder that is there already, with overwrite=False")
def overwrite(run: Run) -> None:
    model, optimizer = trained(run)
    for attempt in range(2):
        try:
            dcp.save(
                states_of(model, optimizer), storage_writer=FileSystemWriter(run.folder / "saved", overwrite=False)
            )
        except CheckpointException as error:
            assert attempt == 1
            run.note("error", [type(error).__name__, "already exists" in str(error)])
    run.weights(model)


@rows("use_collectives=False")
def without_collectives(run: Run) -> None:
    model, optimizer = trained(run)
    folder = run.folder / "saved"
    dcp.save(states_of(model, optimizer), checkpoint_id=folder, use_collectives=False)
    dist.barrier()
    loaded, its_optimizer = other()
    state = states_of(loaded, its_optimizer)
    dcp.load(state, checkpoint_id=folder)
    load_into(loaded, its_optimizer, state)
    run.note("names", sorted(path.name for path in folder.iterdir()))
    alike(run, model, optimizer, loaded, its_optimizer)


def asynchronously(run: Run, **settings: Any) -> None:
    model, optimizer = trained(run)
    before = whole(model)
    settings = {name: value() if callable(value) else value for name, value in settings.items()}
    # The checkpoint needs its own process group, because its collectives run at the same time as those of training.
    settings["process_group"] = dist.new_group()
    answer = dcp.async_save(states_of(model, optimizer), checkpoint_id=run.folder / "saved", **settings)
    if hasattr(answer, "staging_completion"):
        answer.staging_completion.result()
        answer = answer.upload_completion
    train(model, optimizer, run.rank, range(5, 7))  # train while the files are written
    answer.result()
    dist.barrier()
    loaded, its_optimizer = other()
    state = states_of(loaded, its_optimizer)
    dcp.load(state, checkpoint_id=run.folder / "saved")
    load_into(loaded, its_optimizer, state)
    run.agrees("weights", whole(loaded), before, 0.0)
    losses = train(loaded, its_optimizer, run.rank, range(5, 7))
    run.agrees("later weights", whole(loaded), whole(model), 0.0)
    run.note("losses", losses)
    run.weights(loaded)
    run.files(run.folder)


def stager(**settings: Any) -> Callable[[], Any]:
    return lambda: staging.DefaultStager(staging.StagingOptions(use_pinned_memory=False, **settings))


rows.add("async_save during training", asynchronously)
rows.add(
    "async_save with a DefaultStager that stages in a thread",
    partial(
        asynchronously,
        async_stager=stager(use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False),
    ),
)
rows.add(
    "async_save with BlockingAsyncStager",
    partial(asynchronously, async_stager=lambda: staging.BlockingAsyncStager(cache_staged_state_dict=False)),
)
rows.add(
    "async_save in a process",
    partial(asynchronously, async_checkpointer_type=AsyncCheckpointerType.PROCESS),
    timeout=400,
)


@rows("no_dist: rank 0 saves full states alone, every rank loads them alone")
def alone(run: Run) -> None:
    model, optimizer = trained(run)
    options = StateDictOptions(full_state_dict=True)
    weights, moments = dsd.get_state_dict(model, optimizer, options=options)
    folder = run.folder / "saved"
    if run.rank == 0:
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder, no_dist=True)
    dist.barrier()
    loaded, its_optimizer = other()
    weights, moments = dsd.get_state_dict(loaded, its_optimizer, options=options)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    dsd.set_state_dict(
        loaded, its_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
    )
    run.files(run.folder)
    alike(run, model, optimizer, loaded, its_optimizer)


@rows("allow_partial_load: a model with one block more")
def partially(run: Run) -> None:
    model, _ = trained(run)
    dcp.save({"model": model.state_dict()}, checkpoint_id=run.folder / "saved")
    loaded, _ = other(Config(layers=3))
    state = {"model": loaded.state_dict()}
    try:
        dcp.load(state, checkpoint_id=run.folder / "saved")
    except CheckpointException as error:
        run.note("error", [type(error).__name__, "Missing key" in str(error)])
    dcp.load(state, checkpoint_id=run.folder / "saved", planner=DefaultLoadPlanner(allow_partial_load=True))
    loaded.load_state_dict(state["model"])
    for name, value in whole(model).items():
        run.agrees(name, whole(loaded)[name], value, 0.0)
    run.weights(loaded)


class Training(Stateful):
    """The state of model and optimizer under one name, as in torch's tutorial."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        return states_of(self.model, self.optimizer) | {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_into(self.model, self.optimizer, state)
        self.step = state["step"]


@rows("a Stateful of model, optimizer and step")
def stateful(run: Run) -> None:
    model, optimizer = trained(run)
    state = Training(model, optimizer)
    state.step = 7
    dcp.save({"training": state}, checkpoint_id=run.folder / "saved")
    resumed = Training(*other())
    dcp.load({"training": resumed}, checkpoint_id=run.folder / "saved")
    assert resumed.step == 7
    run.files(run.folder)
    alike(run, model, optimizer, resumed.model, resumed.optimizer)


@rows("modules, optimizers and schedulers as they are")
def bare(run: Run) -> None:
    model, optimizer = trained(run)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scheduler.step()
    dcp.save({"model": model, "scheduler": scheduler}, checkpoint_id=run.folder / "saved")
    loaded, its_optimizer = other()
    its_scheduler = torch.optim.lr_scheduler.ExponentialLR(its_optimizer, 0.5)
    dcp.load({"model": loaded, "scheduler": its_scheduler}, checkpoint_id=run.folder / "saved")
    run.note("scheduler", its_scheduler.state_dict())
    run.agrees("weights", whole(loaded), whole(model), 0.0)
    run.files(run.folder)
    run.note("evaluation", evaluate(loaded, run.rank))


@rows("format_utils: files of torch.save from checkpoints, and back")
def formats(run: Run) -> None:
    model, optimizer = trained(run)
    saved, one_file, again = (run.folder / name for name in ("saved", "one.pt", "again"))
    dcp.save(states_of(model, optimizer), checkpoint_id=saved)
    if run.rank == 0:
        format_utils.dcp_to_torch_save(saved, one_file)
        format_utils.torch_save_to_dcp(one_file, again)
    dist.barrier()
    loaded, its_optimizer = other()
    state = states_of(loaded, its_optimizer)
    dcp.load(state, checkpoint_id=again)
    load_into(loaded, its_optimizer, state)
    run.agrees("weights", whole(loaded), whole(model), 0.0)
    third, _ = other()
    weights = transformer().state_dict()  # this reader of torch supports only plain tensors
    if run.rank == 0:
        torch.save(torch.load(one_file, weights_only=False)["model"], run.folder / "model.pt")
    dist.barrier()
    dcp.load(
        weights,
        storage_reader=format_utils.BroadcastingTorchSaveReader(),
        planner=format_utils.DynamicMetaLoadPlanner(),
        checkpoint_id=run.folder / "model.pt",
    )
    dsd.set_model_state_dict(third, weights, options=StateDictOptions(full_state_dict=True))
    run.agrees("broadcast weights", whole(third), whole(model), 0.0)
    run.files(run.folder)
    alike(run, model, optimizer, loaded, its_optimizer)


@rows("fsspec writers and readers")
def filesystems(run: Run) -> None:
    from torch.distributed.checkpoint import _fsspec_filesystem as fsspec

    def save(state: dict[str, Any], folder: Path) -> None:
        dcp.save(state, storage_writer=fsspec.FsspecWriter(str(folder)))

    def load(state: dict[str, Any], folder: Path) -> None:
        dcp.load(state, storage_reader=fsspec.FsspecReader(str(folder)))

    through_files(run, save, load)


def into_other_meshes(run: Run, config: Config) -> None:
    """Save on every mesh, and load each checkpoint on every other mesh and into an unsharded model."""
    dist.init_process_group("gloo")
    flat = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    column = init_device_mesh("cpu", (4, 1), mesh_dim_names=("copies", "single"))
    by_columns = {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 else None}
    placed: dict[str, dict[str, Any]] = {
        "four": {"mesh": flat},
        "two by two": {"mesh": square},
        "pairs": {"mesh": square["shard"]},
        "one": {"mesh": column["single"]},
    }
    if config is EVEN:
        placed["columns"] = {"mesh": flat} | by_columns
    weights: dict[str, Any] = {}
    for name, settings in placed.items():
        model = transformer(config)
        shard(model, **settings)
        optimizer = started(model)
        torch.manual_seed(3)
        for p in model.parameters():
            p.grad = p.detach() * 0.1  # equal on every mesh, without a reduction
        optimizer.step()
        optimizer.zero_grad()
        run.sharded(model, f"sharded {name}")
        dcp.save(states_of(model, optimizer), checkpoint_id=run.folder / name)
        weights[name] = whole(model)
    for name in placed:
        for into, settings in placed.items():
            if into == name:
                continue
            loaded, its_optimizer = other(config, **settings)
            state = states_of(loaded, its_optimizer)
            dcp.load(state, checkpoint_id=run.folder / name)
            load_into(loaded, its_optimizer, state)
            run.agrees(f"{name} into {into}", whole(loaded), weights[name], 0.0)
            run.agrees(f"{name} into {into}, step", its_optimizer.state_dict()["state"][0]["step"], torch.tensor(1.0))
        plain = transformer(config)
        state = {"model": plain.state_dict()}
        dcp.load(state, checkpoint_id=run.folder / name)
        plain.load_state_dict(state["model"])
        run.agrees(f"{name} into an unsharded model", whole(plain), weights[name], 0.0)
    run.weights(loaded)
    run.files(run.folder)


for config in (UNEVEN, EVEN):
    sizes = "even sizes, and columns" if config is EVEN else "uneven sizes"
    title = f"saved on 4 ranks, 2 x 2, pairs and 1, loaded on each other and unsharded ({sizes})"
    rows.add(title, partial(into_other_meshes, config=config), world=4, timeout=400)


@rows("_patch_model_state_dict and _patch_optimizer_state_dict")
def patched(run: Run) -> None:
    model, optimizer = trained(run)
    loaded, its_optimizer = other()
    for each, of in ((model, optimizer), (loaded, its_optimizer)):
        dsd._patch_model_state_dict(each, options=StateDictOptions())
        dsd._patch_optimizer_state_dict(each, optimizers=of, options=StateDictOptions())
    dcp.save({"model": model, "optimizer": optimizer.state_dict()}, checkpoint_id=run.folder / "saved")
    state = {"model": loaded, "optimizer": its_optimizer.state_dict()}
    dcp.load(state, checkpoint_id=run.folder / "saved")
    its_optimizer.load_state_dict(state["optimizer"])  # type: ignore[arg-type]
    alike(run, model, optimizer, loaded, its_optimizer)


@rows("state_dict and load_state_dict: assign, hooks, keep_vars, a prefix")
def plain_functions(run: Run) -> None:
    model, optimizer = trained(run)
    seen: list[str] = []
    model.register_state_dict_pre_hook(lambda module, prefix, keep: seen.append(f"before {prefix} {keep}"))
    model.register_state_dict_post_hook(lambda module, state, prefix, meta: seen.append(f"after {len(state)}"))
    kept = model.state_dict(keep_vars=True, prefix="net.")
    run.note("variables", [isinstance(each, nn.Parameter) for each in kept.values()])
    run.note("types", kinds(kept))
    loaded, _ = other()
    loaded.register_load_state_dict_post_hook(lambda module, keys: seen.append(f"loaded {keys}"))
    found = loaded.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    run.note("seen", [*seen, str(found)])
    run.agrees("weights", whole(loaded), whole(model), 0.0)
    its_optimizer = started(loaded)
    its_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    alike(run, model, optimizer, loaded, its_optimizer)
