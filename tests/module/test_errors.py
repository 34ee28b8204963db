"""User mistakes raise a ShardConfigError, which is also a built-in error and names the argument or parameter.

All are raised on every rank before any communication, so none of them hangs.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import composable_shard
from _engines import fully_shard
from _models import Block, Stack, vectors
from _pool import simulated
from composable_shard._module.build import _check_offloaded


@contextlib.contextmanager
def rejected(*words, kinds=(ValueError, TypeError)):
    """Check that the body raises a configuration error of one of `kinds` whose message contains all words."""
    with pytest.raises(composable_shard.errors.ShardConfigError) as caught:
        yield
    error = caught.value
    assert isinstance(error, kinds), f"{type(error).__mro__} is none of {kinds}"
    for word in words:
        assert word in str(error), f"{word!r} is not in: {error}"


class Holder(nn.Module):
    """Registers a parameter under the name `inner.odd`."""

    def __init__(self, parameter):
        super().__init__()
        self.inner = nn.Module()
        self.inner.odd = parameter
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        return self.lin(x)


class Container(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x):
        return self.items[0](x)


@pytest.mark.parametrize("kind", ["list", "dict", "inside a list"])
@simulated(world=2)
def test_containers_without_forward_are_rejected(rank, world, kind):
    modules = {
        "list": (nn.ModuleList([nn.Linear(4, 4)]), "ModuleList"),
        "dict": (nn.ModuleDict({"a": nn.Linear(4, 4)}), "ModuleDict"),
        "inside a list": ([nn.Linear(4, 4), nn.ModuleList()], "ModuleList"),
    }
    module, word = modules[kind]
    with rejected(word, "forward", kinds=ValueError):
        fully_shard(module)


@simulated(world=2)
def test_a_container_with_a_forward_is_accepted(rank, world):
    model = Container()
    fully_shard(model)
    model(torch.randn(2, 4)).sum().backward()


@pytest.mark.parametrize("what", ["number", "list of numbers", "class"])
@simulated(world=2)
def test_objects_that_are_not_modules_are_rejected(rank, world, what):
    value = {"number": 5, "list of numbers": [nn.Linear(4, 4), 5], "class": nn.Linear}[what]
    with rejected("module", kinds=TypeError):
        fully_shard(value)


@simulated(world=2)
def test_an_empty_list_is_rejected(rank, world):
    with rejected("module", "empty", kinds=ValueError):
        fully_shard([])


@simulated(world=2)
def test_sharding_a_module_twice_is_rejected(rank, world):
    model = Stack()
    fully_shard(model.blocks[0])
    with rejected("Block", kinds=ValueError):
        fully_shard(model.blocks[0])
    fully_shard(model)
    with rejected("Stack", kinds=ValueError):
        fully_shard(model)
    model(*vectors(rank, 0)).sum().backward()


@simulated(world=2)
def test_sharding_a_module_twice_through_a_list_is_rejected(rank, world):
    model = Stack()
    fully_shard(model.blocks[0])
    with rejected("Block", kinds=ValueError):
        fully_shard([model.blocks[0], model.blocks[1]])


@simulated(world=2)
def test_sharding_the_parent_before_the_child_is_rejected(rank, world):
    model = Stack()
    fully_shard(model)
    with rejected("blocks.0.", "inner modules before outer", kinds=ValueError):
        fully_shard(model.blocks[0])


@pytest.mark.parametrize("mesh", ["name", "group"])
@simulated(world=2)
def test_a_mesh_of_another_type_is_rejected(rank, world, mesh):
    value = {"name": "cpu", "group": torch.distributed.group.WORLD}[mesh]
    with rejected("mesh", kinds=TypeError):
        fully_shard(nn.Linear(4, 4), mesh=value)


@simulated(world=2)
def test_a_mesh_of_three_axes_is_rejected(rank, world):
    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))
    with rejected("mesh", "3", kinds=ValueError):
        fully_shard(nn.Linear(4, 4), mesh=mesh)


@simulated(world=2)
def test_a_mesh_of_two_axes_without_names_is_rejected(rank, world):
    mesh = init_device_mesh("cpu", (1, 2))
    with rejected("mesh", "names", kinds=ValueError):
        fully_shard(nn.Linear(4, 4), mesh=mesh)


@simulated(world=2)
def test_a_mesh_without_this_rank_is_rejected_on_this_rank(rank, world):
    mesh = DeviceMesh("cpu", [0])
    if rank == 1:
        with rejected("mesh", "rank 1", kinds=ValueError):
            fully_shard(nn.Linear(4, 4), mesh=mesh)


@pytest.mark.parametrize("value", ["yes", 1.5, 0, -2, 3, 8, [True]], ids=str)
@simulated(world=(2, 4))
def test_a_wrong_reshard_after_forward_is_rejected(rank, world, value):
    with rejected("reshard_after_forward"):
        fully_shard(nn.Linear(4, 4), reshard_after_forward=value)


@pytest.mark.parametrize("value", ["yes", 1, None], ids=str)
@simulated(world=2)
def test_set_reshard_after_forward_accepts_only_a_bool(rank, world, value):
    model = nn.Linear(4, 4)
    fully_shard(model)
    with rejected("reshard_after_forward", kinds=ValueError):
        model.set_reshard_after_forward(value)


@simulated(world=2)
def test_a_scalar_parameter_is_rejected_by_its_full_name(rank, world):
    model = Holder(nn.Parameter(torch.tensor(1.0)))
    with rejected("inner.odd", kinds=ValueError):
        fully_shard(model)


@simulated(world=2)
def test_a_non_contiguous_parameter_is_rejected_by_its_full_name(rank, world):
    model = Holder(nn.Parameter(torch.randn(4, 6).t()))
    with rejected("inner.odd", "contiguous", kinds=ValueError):
        fully_shard(model)


@simulated(world=2)
def test_a_rejected_call_does_not_change_the_module(rank, world):
    model = Holder(nn.Parameter(torch.tensor(1.0)))
    before, kind = dict(model.named_parameters()), type(model)
    with rejected():
        fully_shard(model)
    assert type(model) is kind
    assert all(p is before[n] for n, p in model.named_parameters())
    fully_shard(model, ignored_params={model.inner.odd})
    model(torch.randn(2, 4)).sum().backward()


OPTIONS = {
    "mp_policy": "bf16",
    "ignored_params": "lin.weight",
    "ignored_params of names": {"lin.weight"},
}


@pytest.mark.parametrize("option", OPTIONS)
@simulated(world=2)
def test_options_of_a_wrong_type_are_rejected(rank, world, option):
    name = option.split()[0]
    with rejected(name, kinds=TypeError):
        fully_shard(nn.Linear(4, 4), **{name: OPTIONS[option]})


FIRST_FORWARD = (ValueError, TypeError, RuntimeError)


@simulated(world=2)
def test_a_list_group_as_root_is_rejected_at_the_first_forward(rank, world):
    model = Stack()
    fully_shard([model.inp, model.head])
    with rejected("root", kinds=FIRST_FORWARD):
        model.inp(*vectors(rank, 0))


@simulated(world=2)
def test_a_submodule_that_ran_before_the_root_is_rejected_at_the_first_forward(rank, world):
    model = Stack()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    with torch.no_grad():
        model.blocks[1](torch.randn(2, 6))
    with rejected("blocks.1", "root", kinds=FIRST_FORWARD):
        model(*vectors(rank, 0))


class ReadsOfOthers(nn.Module):
    """Reads the weight of a sharded child, in its own method or by calling a submodule of the child."""

    def __init__(self, through):
        super().__init__()
        self.inner, self.through = nn.Linear(4, 4), through
        self.reader = nn.Module()
        self.reader.norm = nn.Sequential(nn.LayerNorm(4))

    def forward(self, x):
        x = self.inner(x)
        return self.reader.norm[0](x) if self.through else x @ self.inner.weight


@pytest.mark.parametrize("through", [False, True], ids=["of a child", "through a module"])
@simulated(world=2)
def test_a_note_names_a_weight_that_is_read_while_sharded(rank, world, through):
    model = nn.Sequential(nn.Linear(4, 4), ReadsOfOthers(through))
    fully_shard(model[1].reader.norm if through else model[1].inner)
    fully_shard(model)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor") as caught:
        model(torch.randn(2, 4))
    (note,) = caught.value.__notes__
    expected = "1.reader.norm.0.weight, 1.reader.norm.0.bias" if through else "1.inner.weight, 1.inner.bias"
    assert f"point: {expected}, which {'LayerNorm' if through else 'ReadsOfOthers'} may have read" in note
    parts = model[1].inner, *((model[1].reader.norm,) if through else ())
    model[1].forward = nn.Sequential(*parts).forward
    model(torch.randn(2, 4)).sum().backward()
    assert all(param.grad is not None for param in model[1].inner.parameters()), "training continues"


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def encode(self, ids, *, scale=1.0):
        return self.blocks(self.embed(ids)) * scale

    def forward(self, ids):
        return self.encode(ids).sum()

    def fail(self):
        return 1 / 0

    def compare(self):
        return self.compare_with(torch.ones(5, 4))

    def compare_with(self, other):
        return self.embed.weight - other


@pytest.mark.parametrize("is_root", [True, False])
@simulated(world=2)
def test_a_note_names_the_remedy_for_a_method_that_is_not_a_forward(rank, world, is_root):
    torch.manual_seed(0)
    plain = Encoder()
    encoder = copy.deepcopy(plain)
    for block in encoder.blocks:
        fully_shard(block)
    fully_shard(encoder)
    if not is_root:
        fully_shard(nn.Sequential(encoder, nn.Identity()))
    ids = torch.tensor([1, 2])
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor") as caught:
        encoder.encode(ids)
    (note,) = caught.value.__notes__
    assert "sharded at this point: embed.weight, which Embedding may have read. encode is not a forward" in note
    assert "Call register_fsdp_forward_method(module, 'encode') once" in note
    composable_shard.register_fsdp_forward_method(encoder, "encode")
    assert torch.equal(encoder.encode(ids, scale=2.0), plain.encode(ids, scale=2.0))


@simulated(world=2)
def test_methods_of_a_sharded_module_stay_methods(rank, world):
    """Methods are wrapped so that their errors get notes."""
    encoder = fully_shard(Encoder())
    assert inspect.signature(encoder.encode) == inspect.signature(Encoder().encode)
    assert type(encoder).encode.__qualname__ == "Encoder.encode"
    with pytest.raises(ZeroDivisionError) as caught:
        encoder.fail()
    assert not hasattr(caught.value, "__notes__")
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor") as caught:
        encoder.compare()
    (note,) = caught.value.__notes__
    assert "compare_with is not a forward" in note


class Scaling:
    """A mixin, whose methods libraries patch."""

    def scaled(self, x):
        return x * 2

    def pieces(self):
        yield from self.parameters()

    async def later(self):
        return 1

    def loss(prediction, target):  # noqa: N805 - called on the class
        return prediction - target


class Scaled(Scaling, nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        return self.scaled(self.lin(x))


@simulated(world=2)
def test_patches_of_the_class_of_a_sharded_module_are_followed(rank, world):
    """Libraries replace methods of classes by faster ones, before and after sharding."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    plain, x = Scaled(), torch.randn(2, 4)
    model = fully_shard(copy.deepcopy(plain))
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), plain(x))
    assert torch.equal(model(x), plain(x))
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(Scaling, "scaled", lambda self, x: x * 100)
        for each in (model, fully_shard(copy.deepcopy(plain))):
            assert torch.equal(each(x), plain.lin(x) * 100)
        patches.delattr(Scaling, "scaled")
        assert not hasattr(model, "scaled")
    assert torch.equal(model(x), plain(x))
    assert type(model).scaled is Scaling.scaled
    assert type(model).loss(prediction=2, target=1) == 1
    assert inspect.isgeneratorfunction(model.pieces)
    assert inspect.iscoroutinefunction(model.later)
    assert model.scaled == model.scaled
    assert model.scaled.__self__ is model


@simulated(world=2)
def test_a_plain_input_of_a_tensor_parallel_weight_has_no_note(rank, world):
    """The unsharded parameters of tensor-parallel layers are DTensors, too."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        parallelize_module(layer, mesh["tp"], ColwiseParallel())
        layer.forward = lambda x, layer=layer: torch.ones(2, 4) @ layer.weight.t()
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor") as caught:
        model(torch.randn(2, 4))
    assert not hasattr(caught.value, "__notes__")


class Rotated(nn.Module):
    """Has a buffer that is not persistent, like rotary embeddings."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, x):
        return self.inner(x) * self.table


@simulated(world=2)
def test_a_note_names_a_buffer_that_is_still_on_the_meta_device(rank, world):
    with torch.device("meta"):
        model = nn.Sequential(Rotated(), Rotated())
    for block in model:
        fully_shard(block)
    fully_shard(model)
    composable_shard.checkpoint.load_full_state_dict(
        model, nn.Sequential(Rotated(), Rotated()).state_dict(), assign=True
    )
    with pytest.raises(RuntimeError, match="meta") as caught:
        model(torch.randn(2, 4))
    (note,) = caught.value.__notes__
    assert "still on the meta device: 0.table, 1.table (buffers)" in note
    for block in model:
        block.table = torch.ones(4)
    with pytest.raises(RuntimeError, match="meta") as caught:
        model(torch.empty(2, 4, device="meta"))
    assert not hasattr(caught.value, "__notes__"), "no buffer is the reason"
    model(torch.randn(2, 4)).sum().backward()


@simulated(world=2)
def test_errors_with_other_dtensors_have_no_note(rank, world):
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor") as caught:
        model(DTensor.from_local(torch.randn(2, 4), mesh, [Replicate()]))
    assert not getattr(caught.value, "__notes__", [])


@simulated(world=2)
def test_parameters_left_on_meta_are_listed_at_the_first_forward(rank, world):
    with torch.device("meta"):
        model = Stack(blocks=2)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    for module in (model.inp, model.head, model.blocks[0]):
        module.to_empty(device="cpu")
    with rejected("blocks.1.up.weight", "blocks.1.norm.bias", "meta", kinds=FIRST_FORWARD):
        model(*vectors(rank, 0))


STRATEGIES = {
    "unknown strategy": ({"classes": {Block}, "strategy": "zero4"}, "strategy"),
    "strategy of another type": ({"classes": {Block}, "strategy": 3}, "strategy"),
    "no class": ({"classes": set()}, "classes"),
    "not a class": ({"classes": {"Block"}}, "classes"),
    "class not in the model": ({"classes": {nn.Conv2d}}, "Conv2d"),
    "replicas that do not divide": ({"classes": {Block}, "strategy": "hsdp", "replicas": 3}, "replicas"),
}


@pytest.mark.parametrize("mistake", STRATEGIES)
@simulated(world=2)
def test_mistakes_in_wrapping_by_class_are_rejected(rank, world, mistake):
    options, word = STRATEGIES[mistake]
    options = dict(options)
    classes = options.pop("classes")
    with rejected(word):
        composable_shard.shard_by_class(Stack(), classes, **options)


@pytest.mark.parametrize("value", [-1, "1MB", 1.5], ids=str)
@simulated(world=2)
def test_a_wrong_size_limit_is_rejected(rank, world, value):
    with rejected("min_bytes"):
        composable_shard.shard_by_size(Stack(), min_bytes=value)


def on_another_device(*shape):
    """A tensor that claims to be on a GPU, even if there is none."""
    with FakeTensorMode():
        return torch.empty(shape, device="cuda")


@simulated(world=2)
def test_a_parameter_on_another_device_is_rejected_by_its_name(rank, world):
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].weight = nn.Parameter(on_another_device(2, 2))
    with pytest.raises(ValueError, match=r"parameter 0.weight: is on cuda:0, but this rank computes on cpu; set"):
        fully_shard(model)


@simulated(world=2)
def test_a_dtensor_on_a_mesh_of_another_device_type_is_rejected_by_its_name(rank, world):
    other = DeviceMesh("meta", [0, 1], mesh_dim_names=("tp",), _init_backend=False)
    model = nn.Linear(2, 2)
    weight = torch.empty(2, 2, device="meta")
    model.weight = nn.Parameter(DTensor.from_local(weight, other, [Replicate()], run_check=False))
    with pytest.raises(ValueError, match=r"parameter weight: is a DTensor on .*, of another device type than"):
        fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))


@simulated(world=1)
def test_offloaded_parameters_that_are_not_on_the_cpu_are_listed(rank, world):
    param = SimpleNamespace(fqn="block.weight", local=on_another_device(2))
    asked = SimpleNamespace(info=SimpleNamespace(offloads=True), params=[param])
    with pytest.raises(
        RuntimeError,
        match=r"materialized on CPU when .*load a CPU state dict.*: \[\('block.weight', device\(type='cuda'",
    ):
        _check_offloaded([asked])
