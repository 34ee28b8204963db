"""Parameters that are added, moved or deleted after sharding, as PEFT does: adapters, replaced and merged layers."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch
from _engines import ENGINES, fully_shard, mesh_of
from _parity import own_part
from _pool import distributed, simulated
from _sides import whole
from _stepping import counted_gathers

ADDED = "were added after fully_shard"


class Lora(nn.Module):
    """A low-rank adapter around a linear layer, in separate modules, like PEFT's."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_a = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_b = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_b["default"](self.lora_a["default"](x))

    def merge(self):
        """Add the adapter to the weight, sharded or not, and return the layer."""
        delta = self.lora_b["default"].weight @ self.lora_a["default"].weight
        self.base_layer.weight.data += delta
        return self.base_layer


def add_lora(model):
    """Put adapters around all queries and values, and freeze the rest."""
    model.requires_grad_(False)
    torch.manual_seed(7)
    for block in model.blocks:
        block.attention.q, block.attention.v = Lora(block.attention.q), Lora(block.attention.v)
    return model


def merge_and_unload(model):
    for block in model.blocks:
        block.attention.q, block.attention.v = block.attention.q.merge(), block.attention.v.merge()


def shard(model, engine):
    for block in model.blocks:
        engine(block, reshard_after_forward=True)
    engine(model)
    return model


def made(lora=False, **sizes):
    torch.manual_seed(0)
    model = Transformer(**sizes)
    return add_lora(model) if lora else model


def three(lora=False, **sizes):
    """The unsharded model, and the models of both engines."""
    plain = made(lora, **sizes)
    return {"plain": plain} | {name: shard(copy.deepcopy(plain), engine) for name, engine in ENGINES.items()}


def train(models, steps=2, average=lambda name, param: False):
    """Train each rank on different data. The gradients of the unsharded model are averaged over the ranks here."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, model in models.items():
        params = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.SGD(params, lr=0.1)
        for step in range(steps):
            next_token_loss(model, *token_batch(rank, step)).backward()
            for param in params:
                if name == "plain" or (not isinstance(param, DTensor) and average(name, param)):
                    dist.all_reduce(param.grad)
                    param.grad /= world
            optimizer.step()
            optimizer.zero_grad()


def assert_same(models):
    plain = models["plain"].state_dict()
    for name, model in models.items():
        state = model.state_dict()
        assert state.keys() == plain.keys()
        for at, value in state.items():
            torch.testing.assert_close(whole(value), plain[at], msg=lambda m, n=name, at=at: f"{n} {at}: {m}")


# ---- parameters that move


@pytest.mark.parametrize("after", [0, 1])
@distributed(world=2)
def test_training_continues_after_an_adapter_is_merged_into_the_sharded_weight(rank, world, after):
    models = three(lora=True)
    train(models, after)
    for model in models.values():
        merge_and_unload(model)
        model.requires_grad_(True)
    assert_same(models)
    train(models)
    assert_same(models)


@pytest.mark.parametrize("after", [0, 1])
@distributed(world=2)
def test_merging_an_adapter_into_the_unsharded_weight_lasts_one_forward_like_fsdp2(rank, world, after):
    models = three(lora=True)
    train(models, after)
    before = {name: whole(value).clone() for name, value in models["ours"].state_dict().items()}
    outputs = {}
    for name, model in models.items():
        if name != "plain":
            for module in (model, *model.blocks):
                module.unshard()
        merge_and_unload(model)
        with torch.no_grad():
            outputs[name] = model(*token_batch(rank, 3))
            if name != "plain":
                assert not torch.allclose(model(*token_batch(rank, 3)), outputs[name]), "merged weights are kept"
                model.reshard()
        model.requires_grad_(True)
    torch.testing.assert_close(outputs["ours"], outputs["plain"])
    torch.testing.assert_close(outputs["ours"], outputs["fsdp2"])
    for name, value in models["ours"].state_dict().items():
        wrapped = name.replace("weight", "base_layer.weight")
        assert torch.equal(whole(value), before[wrapped if wrapped in before else name])
    del models["plain"]
    train(models)
    ours, theirs = (model.state_dict() for model in models.values())
    for name, value in ours.items():
        torch.testing.assert_close(whole(value), whole(theirs[name]))


@pytest.mark.parametrize("unsharded", [False, True])
@distributed(world=2)
def test_a_parameter_may_move_to_another_module(rank, world, unsharded):
    """FSDP2 still looks for the parameter in its old module."""
    models = three()
    train(models, 1)
    for name, model in models.items():
        if unsharded and name != "plain":
            model.blocks[0].unshard()
        old = model.blocks[0].attention.q
        model.blocks[0].attention.q = new = nn.Linear(16, 16, bias=False, device="meta")
        new.weight = old.weight
        gate = model.blocks[0].feed_forward.gate
        model.blocks[0].feed_forward.gate = new = nn.Linear(16, 24, bias=False, device="meta")
        new.weight = gate.weight
        del gate.weight
    theirs = {"fsdp2": models.pop("fsdp2")}
    if not unsharded:  # else FSDP2 uses the unsharded copy from now on, and never trains it
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            train(theirs, 1)
    model = models["ours"]
    next_token_loss(model, *token_batch(rank, 0)).backward()
    model.zero_grad()
    assert_same(models)
    train(models)
    assert_same(models)
    model.blocks[0].unshard()
    assert isinstance(model.state_dict()["blocks.0.attention.q.weight"], DTensor), "also in its new module"
    model.blocks[0].reshard()
    train({"copy": copy.deepcopy(model), "ours": model})


def apart(model, engine):
    engine(model.embed)
    engine(model.head)
    return shard(model, engine)


@pytest.mark.parametrize("sharded", [shard, apart], ids=["one group", "two groups"])
@pytest.mark.parametrize("before", [0, 1])
@distributed(world=2)
def test_weights_tied_after_sharding_get_the_sum_of_both_gradients(rank, world, sharded, before):
    """FSDP2 keeps two weights once it has run, and before that it trains weights of uneven length differently."""
    models = {"plain": made(), "ours": sharded(made(), fully_shard)}
    train(models, before)
    models["ours"].reshard()
    for model in models.values():
        model.head.weight = model.embed.weight
    train(models, 3)
    assert_same(models)


@distributed(world=2)
def test_an_adapter_may_be_deleted(rank, world):
    models = three(lora=True)
    train(models, 1)
    for model in models.values():
        for block in model.blocks:
            block.attention.q = block.attention.q.base_layer
            block.attention.v.lora_a["default"] = nn.Identity()
            block.attention.v.lora_b = nn.ModuleDict({"default": nn.Linear(16, 8, bias=False).requires_grad_(False)})
            nn.init.zeros_(block.attention.v.lora_b["default"].weight)
        model.requires_grad_(True)
        for block in model.blocks:
            block.attention.v.lora_b.requires_grad_(False)
    models["ours"].allow_unmanaged_parameters()
    train(models)
    assert_same(models)


# ---- parameters that are added


class Rootless(nn.Module):
    """A root without own parameters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.holder = nn.ModuleDict({"inner": nn.ModuleList([nn.Sequential()])})

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.holder["inner"][0](x)


def add_child(model):
    model.extra = nn.Linear(4, 4)


def add_to_list(model):
    model.layers.append(nn.Linear(4, 4))


def add_deep(model):
    model.holder["inner"][0].append(nn.Linear(4, 4))


def add_deep_in_new(model):
    model.holder["inner"].append(nn.Sequential())
    if model._shard_state.bound is not None:
        model(torch.ones(2, 4))  # a forward with the new, still empty module
    model.holder["inner"][1].append(nn.Linear(4, 4))


def replace_layer(model):
    model.layers[1] = nn.Linear(4, 4)


def add_parameter(model):
    model.register_parameter("scale", nn.Parameter(torch.ones(4)))


def add_parameter_to_list(model):
    model.layers.register_parameter("scale", nn.Parameter(torch.ones(4)))


def add_tensor_parallel(model):
    model.scale = nn.Parameter(distribute_tensor(torch.ones(4), mesh_of(dist.get_world_size()), [Replicate()]))


def replace_ignored(model):
    del model.ignored
    model.scale = nn.Parameter(torch.ones(4))


WAYS = [
    add_child, add_to_list, add_deep, add_deep_in_new, replace_layer, add_parameter, add_parameter_to_list,
    add_tensor_parallel, replace_ignored,
]  # fmt: skip


@pytest.mark.parametrize("own", [False, True], ids=["root without parameters", "root with some"])
@pytest.mark.parametrize("run_before", [False, True])
@simulated(world=2)
def test_an_added_parameter_is_refused_wherever_it_is_added(rank, world, run_before, own):
    for way in WAYS:
        model = Rootless()
        if own:
            model.first = nn.Linear(4, 4)
            model.register_forward_pre_hook(lambda m, args: (m.first(*args),))
        model.ignored = nn.Parameter(torch.ones(4))
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model, ignored_params={model.ignored})
        if run_before:
            model(torch.ones(2, 4)).sum().backward()
            model.zero_grad()
        way(model)
        with pytest.raises(cs.errors.ShardConfigStateError, match=ADDED) as caught:
            model(torch.ones(2, 4))
        assert "call fully_shard on the module that was added" in str(caught.value), way.__name__
        assert "allow_unmanaged_parameters() on the model" in str(caught.value)
        with pytest.raises(cs.errors.ShardConfigStateError, match=ADDED):
            model(torch.ones(2, 4))
        model.allow_unmanaged_parameters()
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("after", [0, 1])
@distributed(world=2)
def test_late_adapters_evaluate_but_are_refused_when_they_train(rank, world, after):
    models = three()
    train(models, after)
    for model in models.values():
        add_lora(model).requires_grad_(False)

    def assert_alike(*contexts):
        outputs = {}
        for name, model in models.items():
            with contextlib.ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context())
                outputs[name] = model(*token_batch(rank, 3))
        torch.testing.assert_close(outputs["ours"], outputs["plain"])
        torch.testing.assert_close(outputs["ours"], outputs["fsdp2"])

    assert_alike()  # all parameters are frozen
    adapters = [
        part for block in models["ours"].blocks for part in (block.attention.q.lora_a, block.attention.v.lora_b)
    ]
    for adapter in adapters:
        adapter.requires_grad_(True)
    assert_alike(torch.no_grad)
    assert_alike(torch.inference_mode)
    for _ in range(2):
        with pytest.raises(
            cs.errors.ShardConfigStateError,
            match=rf"parameters blocks.0.attention.q.lora_a.default.weight, .*v\.lora_b.*{ADDED}",
        ) as caught:
            models["ours"](*token_batch(rank, 3))
        assert "lora_b.default.weight, blocks.0.attention.v.lora_a" not in str(caught.value), "lora_a of v is frozen"
    for adapter in adapters:
        adapter.requires_grad_(False)
    assert_alike()


@pytest.mark.parametrize("after", [0, 1])
@distributed(world=2)
def test_late_adapters_train_if_hooks_average_their_gradients(rank, world, after):
    models = three()
    train(models, after)
    handles = []
    for name, model in models.items():
        add_lora(model)
        if name != "plain":  # `train` averages the gradients of the plain model
            handles += [
                param.register_post_accumulate_grad_hook(lambda it: dist.all_reduce(it.grad, op=dist.ReduceOp.AVG))
                for param in model.parameters()
                if param.requires_grad
            ]
    train(models)
    assert_same(models)
    for handle in handles:
        handle.remove()
    with pytest.raises(cs.errors.ShardConfigStateError, match=ADDED):
        models["ours"](*token_batch(rank, 3))


@pytest.mark.parametrize("after", [0, 1])
@distributed(world=2)
def test_late_adapters_train_if_they_are_sharded(rank, world, after):
    models = three()
    train(models, after)
    for name, model in models.items():
        add_lora(model)
        if name != "plain":
            for block in model.blocks:
                for layer in (block.attention.q, block.attention.v):
                    ENGINES[name](layer.lora_a["default"])
                    ENGINES[name](layer.lora_b["default"])
    train(models)
    assert_same(models)
    for name, model in models.items():
        assert all(isinstance(param, DTensor) for param in model.parameters()) is (name != "plain")


@pytest.mark.parametrize("after", [0, 1])
@distributed(world=2)
def test_late_adapters_train_if_the_user_averages_their_gradients(rank, world, after):
    models = three()
    train(models, after)
    for model in models.values():
        add_lora(model)
    with pytest.raises(cs.errors.ShardConfigStateError, match=rf"q\.lora_a\.default\.weight.*{ADDED}"):
        train({"ours": models["ours"]})
    models["ours"].allow_unmanaged_parameters()
    train(models, average=lambda name, param: True)
    assert_same(models)
    for model in models.values():
        model.requires_grad_(True)
    train(models, average=lambda name, param: True)
    assert_same(models)
    for model in models.values():
        for block in model.blocks:
            block.attention.q, block.attention.v = block.attention.q.base_layer, block.attention.v.base_layer
    train(models)
    assert_same(models)


@distributed(world=2)
def test_allowed_parameters_train_on_each_rank_separately_like_fsdp2(rank, world):
    models = three()
    del models["plain"]
    for model in models.values():
        add_lora(model)
    models["ours"].allow_unmanaged_parameters()
    train(models)
    ours, theirs = (model.state_dict() for model in models.values())
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert isinstance(value, DTensor) is isinstance(theirs[name], DTensor)
        torch.testing.assert_close(own_part(value), own_part(theirs[name]))
    locally = ours["blocks.0.attention.q.lora_b.default.weight"]
    found = [torch.empty_like(locally) for _ in range(world)]
    dist.all_gather(found, locally.contiguous())
    assert not torch.equal(*found)


@simulated(world=2)
def test_allow_unmanaged_parameters_applies_below_unless_recurse_is_false(rank, world):
    model = shard(made(), fully_shard)
    next_token_loss(model, *token_batch(0, 0)).backward()
    model.allow_unmanaged_parameters(recurse=False)
    model.note = nn.Parameter(torch.ones(3))
    next_token_loss(model, *token_batch(0, 0)).backward()
    model.blocks[1].note = nn.Parameter(torch.ones(3))
    with pytest.raises(cs.errors.ShardConfigStateError, match=ADDED):
        next_token_loss(model, *token_batch(0, 0))
    twin = copy.deepcopy(model)
    model.blocks[1].allow_unmanaged_parameters()
    next_token_loss(model, *token_batch(0, 0)).backward()
    with pytest.raises(cs.errors.ShardConfigStateError, match=ADDED):
        next_token_loss(twin, *token_batch(0, 0))


# ---- compiled


@pytest.mark.matrix
@distributed(world=2)
def test_adapters_can_be_merged_in_a_compiled_model(rank, world):
    models = three(lora=True, layers=1)
    del models["fsdp2"]
    compiled = models | {"ours": torch.compile(models["ours"], backend="aot_eager")}
    train(compiled, 1)
    for model in models.values():
        merge_and_unload(model)
        model.requires_grad_(True)
    train(compiled, 1)
    assert_same(models)


@pytest.mark.parametrize("trained_before", [False, True], ids=["first forward", "later"])
@simulated(world=2)
def test_an_added_parameter_has_the_name_of_its_block(rank, world, trained_before):
    model = shard(made(), fully_shard)
    batch = token_batch(rank, 0)
    if trained_before:
        next_token_loss(model, *batch).backward()
    model.blocks[1].attention.extra = nn.Linear(2, 2, bias=False)
    with pytest.raises(
        cs.errors.ShardConfigStateError, match=rf"parameters blocks\.1\.attention\.extra\.weight: {ADDED}"
    ):
        next_token_loss(model, *batch)


@distributed(world=2)
def test_only_the_group_of_a_replaced_parameter_is_gathered_again(rank, world):
    """All groups stay unsharded between steps."""
    torch.manual_seed(0)
    plain = Transformer()
    model = copy.deepcopy(plain)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=False)
    fully_shard(model)
    model.set_reshard_after_backward(False)
    models = {"plain": plain, "ours": model}
    for each in models.values():
        next_token_loss(each, *token_batch(0, 0)).backward()
        norm = each.blocks[1].attention_norm
        norm.weight = nn.Parameter(torch.full_like(norm.weight.detach(), 1.25))
    with counted_gathers() as gathered:
        losses = [next_token_loss(each, *token_batch(0, 1)) for each in models.values()]
    assert gathered == ["blocks.1"]
    assert torch.equal(*losses)
