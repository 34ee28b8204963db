"""Full states, checkpoints and exports of models with state dict hooks are complete."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch
from _engines import ENGINES
from _pool import distributed
from checkpoint._hooked import MODELS, build, full, hook, on_meta, once
from checkpoint._nets import assert_equal
from composable_shard import checkpoint
from composable_shard.errors import CheckpointError, CheckpointMismatchError

FULL = StateDictOptions(full_state_dict=True)


def sharded(kind, seed=0, engine="ours", **options):
    model = build(kind, seed)
    for block in model.blocks:
        ENGINES[engine](block, **options)
    return ENGINES[engine](model, **options)


def sharded_on_meta(kind):
    """A sharded model on meta, except for values that no state dict has."""
    model = on_meta(kind)
    for block in model.blocks:
        cs.fully_shard(block)
    return cs.fully_shard(model)


def assert_trains_as(model, plain, rank, world):
    """Check one more training step and an evaluation."""
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    next_token_loss(model, *token_batch(rank, 5)).backward()
    (sum(next_token_loss(plain, *token_batch(r, 5)) for r in range(world)) / world).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(model(*token_batch(0, 6)), plain(*token_batch(0, 6)))


@pytest.mark.matrix
@distributed(world=2)
def test_compiled_modules_keep_their_names(rank, world, tmp_path):
    def blocks(model):
        model.blocks[0].feed_forward = checkpoint_wrapper(model.blocks[0].feed_forward)
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, backend="eager")
        return model

    plain = build("renamed", 1)
    each_once = once(plain)
    for index, wrap in enumerate((blocks, lambda model: cs.compile(model, backend="eager"))):
        model, other = wrap(sharded("renamed", 1)), wrap(sharded("renamed", 2))
        for each in (model, other):
            with torch.no_grad():
                each(*token_batch(rank, 0))
        state = cs.checkpoint.full_state_dict(model, rank0_only=False)
        assert_equal(state, plain.state_dict())
        assert_equal(dict(cs.checkpoint.iter_full_state(model)), each_once)
        checkpoint.save(tmp_path / "own", {"model": model}, step=index)
        with warnings.catch_warnings():  # Dynamo reads `.grad` of all attributes of a module
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            cs.checkpoint.load_full_state_dict(other, state)
            assert_trains_as(other, build("renamed", 1), rank, world)
        checkpoint.load(tmp_path / "own", {"model": other})
        assert_equal(cs.checkpoint.full_state_dict(other, rank0_only=False), state)


def weights(name):
    """A `rename` for exports, which cannot store values that are not tensors."""
    return None if name.endswith("_extra_state") else name


@pytest.mark.parametrize("kind", MODELS)
@distributed(world=2)
def test_full_states_equal_those_of_the_unsharded_model(rank, world, kind):
    plain = build(kind)
    expected, each_once = plain.state_dict(), once(plain)
    for engine in ENGINES:
        model = sharded(kind, engine=engine, reshard_after_forward=False)
        if engine == "fsdp2":
            assert list(model.state_dict()) == list(expected)
        for _ in range(2):
            assert_equal(cs.checkpoint.full_state_dict(model, rank0_only=False), expected)
            assert_equal(cs.checkpoint.full_state_dict(model), {} if rank else expected)
            assert_equal(dict(cs.checkpoint.iter_full_state(model)), each_once)
            own = {name: full(each) for name, each in model.state_dict().items()}
            assert_equal(own, expected)
            with torch.no_grad():
                model(*token_batch(rank, 0))  # keeps weights unsharded
        state = cs.checkpoint.full_state_dict(
            torch.compile(model, backend="eager"), rank0_only=False, dtype=torch.bfloat16
        )
        assert list(state) == list(expected)
        assert {each.dtype for each in state.values() if torch.is_tensor(each)} <= {torch.bfloat16, torch.int64}
    optimizer = torch.optim.AdamW(model.parameters())
    next_token_loss(model, *token_batch(rank, 0)).backward()
    optimizer.step()
    theirs = get_optimizer_state_dict(model, optimizer, options=FULL)["state"] if "renamed" not in kind else None
    ours = cs.checkpoint.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    names = [name for name, param in model.named_parameters() if param.requires_grad]
    assert list(ours["state"]) == (names if theirs is None else list(theirs))
    fresh = torch.optim.AdamW(model.parameters())
    cs.checkpoint.load_full_optimizer_state_dict(model, fresh, ours)
    again = cs.checkpoint.full_optimizer_state_dict(model, fresh, rank0_only=False)
    for name in names:
        assert_equal(again["state"][name], ours["state"][name])


@pytest.mark.parametrize("kind", MODELS)
@distributed(world=2)
def test_full_states_load_through_hooks(rank, world, kind):
    state = build(kind, 1).state_dict()
    for options in ({}, {"broadcast_from_rank0": True}, {"assign": True}, {"assign": True, "meta": True}):
        model = sharded_on_meta(kind) if options.pop("meta", False) else sharded(kind, 2, reshard_after_forward=False)
        if not options:
            model(*token_batch(rank, 0))
        given = state if rank == 0 or "broadcast_from_rank0" not in options else None
        assert cs.checkpoint.load_full_state_dict(model, given, **options) == ([], [])
        assert_equal(cs.checkpoint.full_state_dict(model, rank0_only=False), state)
        assert model.recipe == "of seed 1"
        assert "tied" not in kind or model.head.weight is model.embed.weight
        assert_trains_as(model, build(kind, 1), rank, world)
    model = sharded(kind, 2)
    model.load_state_dict(state, strict=kind != "deleted")
    assert_equal({name: full(each) for name, each in model.state_dict().items()}, state)


@pytest.mark.parametrize("kind", MODELS)
@distributed(world=2)
def test_checkpoints_and_exports_are_complete(rank, world, kind, tmp_path):
    plain, model = build(kind, 1), sharded(kind, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    state, each_once = plain.state_dict(), once(plain)
    checkpoint.save(tmp_path / "own", {"model": model, "optimizer": optimizer}, step=1)
    for size, name in ((10**9, "one"), (4000, "parts")):
        folder = checkpoint.export_safetensors(tmp_path / name, model, rename=weights, max_shard_size=size)
        files = [load_file(each) for each in sorted(folder.glob("*.safetensors"))]
        merged = {name: each for file in files for name, each in file.items()}
        assert merged.keys() == each_once.keys()
        assert_equal({name: merged[name] for name in each_once}, each_once)
        if size < 10**9:
            index = json.loads((folder / "model.safetensors.index.json").read_text())
            assert index["weight_map"].keys() == each_once.keys()
    checkpoint.export_dcp(tmp_path / "dcp", {"model": model})
    for make in (lambda: sharded(kind, 2), lambda: sharded_on_meta(kind)):
        for load in ("own", "one", "dcp"):
            other = make()
            if load == "own":
                checkpoint.load(tmp_path / "own", {"model": other})
            elif load == "dcp":
                checkpoint.import_dcp(tmp_path / "dcp", {"model": other})
            else:
                checkpoint.import_safetensors(tmp_path / "one", other, strict=False)  # without the extra state
                other.recipe = "of seed 1"
            assert_equal(cs.checkpoint.full_state_dict(other, rank0_only=False), state)
            assert other.recipe == "of seed 1", load
            assert "tied" not in kind or other.head.weight is other.embed.weight
            assert_trains_as(other, build(kind, 1), rank, world)


# ---- errors


class FaultError(Exception):
    """Raised by a hook."""


@distributed(world=2)
def test_an_error_on_one_rank_is_raised_on_all_ranks(rank, world, tmp_path):
    def fail(state, prefix):
        if rank == 1 and model.fails:
            raise FaultError("no such recipe")

    model = sharded("renamed")
    model.fails = True
    hook(model, fail, fail)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    next_token_loss(model, *token_batch(rank, 0)).backward()
    optimizer.step()
    calls = {
        "full_state_dict": lambda: cs.checkpoint.full_state_dict(model),
        "iter_full_state": lambda: list(cs.checkpoint.iter_full_state(model)),
        "full_optimizer_state_dict": lambda: cs.checkpoint.full_optimizer_state_dict(model, optimizer),
        "full_parameters": lambda: cs.checkpoint.full_parameters(model).__enter__(),
        "export": lambda: checkpoint.export_safetensors(tmp_path / "out", model, rename=weights),
        "save": lambda: checkpoint.save(tmp_path / "own", {"model": model}, step=0),
    }
    for name, call in calls.items():
        with pytest.raises(CheckpointError, match=r"rank 1: .*FaultError: no such recipe"):
            call()
        assert list(tmp_path.iterdir()) == [], name
    model.fails = False
    state = cs.checkpoint.full_state_dict(model, rank0_only=False)
    model.fails = True
    with pytest.raises(CheckpointError, match=r"rank 1: .*FaultError: no such recipe"):
        cs.checkpoint.load_full_state_dict(model, state)
    model.fails = False
    cs.checkpoint.load_full_state_dict(model, state)
    assert_equal(cs.checkpoint.full_state_dict(model, rank0_only=False), state)


@distributed(world=2)
def test_different_hooks_on_ranks_raise_an_error(rank, world):
    model = sharded("renamed")
    hook(model, lambda state, prefix: state.pop("norm.weight") if rank == 1 else None, None)
    for call in (cs.checkpoint.full_state_dict, lambda model: list(cs.checkpoint.iter_full_state(model))):
        with pytest.raises(CheckpointMismatchError, match=r"has norm\.weight .* on rank 0 and .* on rank 1"):
            call(model)


@pytest.mark.parametrize("wraps", [False, True])
@distributed(world=2)
def test_values_that_no_hook_loads_are_named(rank, world, wraps, tmp_path):
    def one(seed):
        torch.manual_seed(seed)
        model = Transformer()
        for block in model.blocks:
            hook(
                block.attention,
                lambda state, prefix: state.update({prefix + "same": state[prefix + "k.weight"].clone()}),
                None,
            )
            hook(
                block.attention.q,
                lambda state, prefix: state.update({prefix + "half": state.pop(prefix + "weight") / 2}),
                None,
            )
        if wraps:
            model.blocks = torch.nn.ModuleList(map(checkpoint_wrapper, model.blocks))
        return cs.fully_shard(model)

    state, model = cs.checkpoint.full_state_dict(one(0), rank0_only=False), one(1)
    message = r"blocks\.0\.attention\.q\.half, .*no hook of load_state_dict"
    with pytest.raises(CheckpointError, match=message):
        cs.checkpoint.load_full_state_dict(model, state)
    keys = cs.checkpoint.load_full_state_dict(one(1), state, strict=False)
    assert keys.unexpected_keys == [f"blocks.{i}.attention.q.half" for i in range(2)]  # `same` has the value of k
    checkpoint.save(tmp_path, {"model": one(0)}, step=0)
    with pytest.raises(CheckpointError, match=r"blocks\.0\.attention\.q\.half"):
        checkpoint.load(tmp_path, {"model": one(1)})


@distributed(world=2)
def test_weights_in_containers_and_duplicate_names_are_refused(rank, world):
    def nest(state, prefix):
        state["block"] = {"norm": state.pop("norm.weight")}

    model = sharded("tied and renamed")
    hook(model, nest, None)
    for call in (cs.checkpoint.full_state_dict, cs.checkpoint.iter_full_state):
        with pytest.raises(CheckpointError, match="block is a dict that contains sharded tensors"):
            call(model)
    model = sharded("renamed")
    hook(model, lambda state, prefix: state.update({"_orig_mod.norm.weight": 2 * state["norm.weight"]}), None)
    with pytest.raises(CheckpointError, match=r"_orig_mod\.norm\.weight: the state dict .* two values"):
        cs.checkpoint.full_state_dict(model)


@distributed(world=2)
def test_buffers_that_differ_between_ranks_may_be_renamed(rank, world, tmp_path):
    model = sharded("renamed")
    model.seen.fill_(rank)
    checkpoint.save(tmp_path, {"model": model}, step=0)
    other = sharded("renamed", 1)
    checkpoint.load(tmp_path, {"model": other})
    assert other.seen.unique().tolist() in ([0.0], [1.0])
    assert not isinstance(other.seen, DTensor)


@distributed(world=2)
def test_a_state_dict_on_one_rank_after_a_forward_does_not_block_the_full_state(rank, world):
    """After a forward, the root's unsharded parameters are installed. A state dict installs the sharded ones."""
    torch.manual_seed(0)
    plain = Transformer()
    torch.manual_seed(0)
    model = cs.fully_shard(Transformer())
    model(*token_batch(rank, 0))
    if rank == 0:
        model.state_dict()
    assert_equal(cs.checkpoint.full_state_dict(model, rank0_only=False), plain.state_dict())

    def fail(module, state, prefix, metadata):
        raise ValueError(f"on rank {rank}")

    model(*token_batch(rank, 0))
    handle = model.register_state_dict_post_hook(fail) if rank == 1 else None
    with pytest.raises(CheckpointError, match="on rank 1"):
        cs.checkpoint.full_state_dict(model)
    if handle is not None:
        handle.remove()
    assert_equal(cs.checkpoint.full_state_dict(model, rank0_only=False), plain.state_dict())
