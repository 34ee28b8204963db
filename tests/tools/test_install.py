"""`install` and `uninstall`: the names that they replace, skip and restore."""

from __future__ import annotations

import copy
import functools
import importlib.util
import pickle
import subprocess
import sys
import textwrap
import threading
import types

import pytest
import torch
import torch.distributed as dist
import torch.distributed._composable.fsdp as composable
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fully_shard as home
from torch.distributed.tensor import DTensor

import composable_shard
from _pool import distributed, simulated
from composable_shard._integrations import install as machinery

NAMES = ["fully_shard", "register_fsdp_forward_method", "share_comm_ctx"]
TORCHS = {name: getattr(home, name) for name in NAMES}
OURS = {name: getattr(composable_shard, name) for name in NAMES}


@pytest.fixture(autouse=True)
def _torch_is_left_as_it_was():
    yield
    left = bool(machinery._holders)
    composable_shard.uninstall()
    for name in NAMES:
        setattr(fsdp, name, TORCHS[name])
    assert not left, "the test did not uninstall"


@pytest.fixture
def module():
    """An empty module in `sys.modules`."""
    made = types.ModuleType("a_library_of_others")
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


def installed():
    found = {getattr(fsdp, name) is OURS[name] for name in NAMES}
    assert len(found) == 1
    return found.pop()


def import_into(module, source):
    exec(textwrap.dedent(source), vars(module))


# ---- replaced names


def test_install_replaces_all_names_of_torch_and_uninstall_restores_them():
    composable_shard.install()
    for name in NAMES:
        assert getattr(fsdp, name) is OURS[name]
        assert getattr(fsdp._fully_shard, name) is OURS[name]
        if hasattr(composable, name):
            assert getattr(composable, name) is OURS[name]
            assert getattr(sys.modules[f"{composable.__name__}.fully_shard"], name) is OURS[name]
    composable_shard.uninstall()
    for name in NAMES:
        assert getattr(fsdp, name) is getattr(fsdp._fully_shard, name) is TORCHS[name]
        if hasattr(composable, name):
            assert getattr(composable, name) is TORCHS[name]
            assert getattr(sys.modules[f"{composable.__name__}.fully_shard"], name) is TORCHS[name]


def test_the_module_in_which_torch_defines_the_names_is_not_changed():
    with composable_shard.install():
        assert {name: getattr(home, name) for name in NAMES} == TORCHS


def test_classes_are_subclasses_of_torchs_and_policies_are_the_same():
    with composable_shard.install():
        for name in ("FSDPModule", "UnshardHandle"):
            assert issubclass(getattr(composable_shard, name), getattr(fsdp, name))
        for name in ("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"):
            assert getattr(composable_shard, name) is getattr(fsdp, name)


def test_install_replaces_the_function_in_loaded_modules_under_any_name(module):
    module.shard, module.other = TORCHS["fully_shard"], len
    with composable_shard.install():
        assert module.shard is OURS["fully_shard"]
        assert module.other is len
    assert module.shard is TORCHS["fully_shard"]


def test_install_does_not_change_modules_of_this_library():
    held = composable_shard._torch.distributed._torchs_fully_shard
    with composable_shard.install():
        assert composable_shard._torch.distributed._torchs_fully_shard is held is TORCHS["fully_shard"]
        assert composable_shard.fully_shard is OURS["fully_shard"]
    assert composable_shard.fully_shard is composable_shard._api.fully_shard is OURS["fully_shard"]


@pytest.mark.parametrize(
    "source",
    ["from torch.distributed.fsdp import fully_shard", "from torch.distributed.fsdp import *"],
    ids=["by name", "star"],
)
def test_uninstall_restores_modules_that_were_imported_while_installed(module, source):
    with composable_shard.install():
        import_into(module, source)
        assert module.fully_shard is OURS["fully_shard"]
    assert module.fully_shard is TORCHS["fully_shard"]


def test_uninstall_does_not_change_modules_that_imported_ours_before(module):
    import_into(module, "from composable_shard import fully_shard")
    with composable_shard.install():
        assert module.fully_shard is OURS["fully_shard"]
    assert module.fully_shard is OURS["fully_shard"]


def test_uninstall_restores_modules_that_were_unloaded_meanwhile(module):
    module.fully_shard = TORCHS["fully_shard"]
    with composable_shard.install():
        sys.modules[module.__name__] = types.ModuleType("another")
    assert module.fully_shard is TORCHS["fully_shard"]


def test_install_does_not_access_attributes_of_modules(module, tmp_path):
    class Asked(types.ModuleType):
        def __getattribute__(self, name):
            raise AssertionError(f"was asked for {name}")

        __getattr__ = __getattribute__

    class NoModule:
        @property
        def __dict__(self):
            raise AssertionError("was looked at")

    (tmp_path / "late.py").write_text("raise AssertionError('was loaded')")
    spec = importlib.util.spec_from_file_location("late", tmp_path / "late.py")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    late = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(late)
    asked = Asked("asked")
    object.__getattribute__(asked, "__dict__")["shard"] = TORCHS["fully_shard"]
    odd = {"asked": asked, "late": late, "no_module": NoModule(), "nothing": None}
    sys.modules.update(odd)
    try:
        with composable_shard.install():
            assert object.__getattribute__(asked, "__dict__")["shard"] is OURS["fully_shard"]
        assert object.__getattribute__(asked, "__dict__")["shard"] is TORCHS["fully_shard"]
    finally:
        for name in odd:
            del sys.modules[name]


def test_references_that_are_no_module_attributes_are_not_replaced(module):
    import_into(
        module,
        """
        import functools
        from torch.distributed.fsdp import fully_shard
        class Sharder:
            shard = staticmethod(fully_shard)
        partial = functools.partial(fully_shard)
        def call(shard=fully_shard):
            return shard
        """,
    )
    with composable_shard.install():
        assert module.fully_shard is OURS["fully_shard"]
        assert module.Sharder.shard is module.partial.func is module.call() is TORCHS["fully_shard"]


def test_pickled_references_resolve_to_the_installed_function():
    reference = pickle.dumps(TORCHS["fully_shard"])
    assert pickle.loads(reference) is TORCHS["fully_shard"]
    with composable_shard.install():
        assert pickle.loads(reference) is OURS["fully_shard"]
        ours = pickle.dumps(fsdp.fully_shard)
    assert pickle.loads(ours) is OURS["fully_shard"]


# ---- contexts and repeated calls


def test_installing_twice_needs_only_one_uninstall():
    composable_shard.install()
    composable_shard.install()
    assert installed()
    composable_shard.uninstall()
    assert not installed()


def test_installing_again_replaces_new_references(module):
    composable_shard.install()
    module.shard = TORCHS["fully_shard"]
    composable_shard.install()
    assert module.shard is OURS["fully_shard"]
    composable_shard.uninstall()
    assert module.shard is TORCHS["fully_shard"]


def test_uninstall_without_install_does_nothing(module):
    module.mine = OURS["fully_shard"]
    composable_shard.uninstall()
    assert not installed()
    assert module.mine is OURS["fully_shard"]


def test_nested_contexts_restore_at_the_end_of_the_outermost_one():
    with composable_shard.install():
        with composable_shard.install() as inner:
            assert installed()
            with inner:
                assert installed()
            assert installed()
        assert installed()
    assert not installed()


def test_a_context_does_not_uninstall_an_earlier_install():
    composable_shard.install()
    with composable_shard.install():
        pass
    assert installed()
    composable_shard.uninstall()


def test_a_context_can_be_entered_later_and_again():
    context = composable_shard.install()
    composable_shard.uninstall()
    assert not installed()
    for _ in range(2):
        with context:
            assert installed()
        assert not installed()


def test_leaving_a_context_does_not_undo_an_uninstall_in_it():
    with composable_shard.install():
        composable_shard.uninstall()
        assert not installed()
    assert not installed()
    with composable_shard.install():
        composable_shard.uninstall()
        composable_shard.install()
    assert installed(), "the second install does not belong to the context"
    composable_shard.uninstall()


def test_an_exception_in_a_context_propagates_and_restores():
    with pytest.raises(KeyError, match="mine"), composable_shard.install():
        raise KeyError("mine")
    assert not installed()


@pytest.mark.matrix
def test_contexts_in_several_threads_stay_installed_until_the_last_one_ends():
    wrong = []
    start = threading.Barrier(8)

    def work():
        start.wait()
        for _ in range(10):
            with composable_shard.install():
                if fsdp.fully_shard is not OURS["fully_shard"]:
                    wrong.append(fsdp.fully_shard)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not installed()


# ---- names that other code has replaced


def somebody_elses(*args, **kwargs):
    return "theirs"


def test_install_keeps_a_function_that_other_code_has_set_and_warns():
    fsdp.fully_shard = somebody_elses
    with pytest.warns(UserWarning, match=r"torch.distributed.fsdp.fully_shard is test_install.somebody_elses") as seen:
        context = composable_shard.install()
    assert seen[0].filename == __file__
    with context:
        assert fsdp.fully_shard is somebody_elses
        assert fsdp.share_comm_ctx is OURS["share_comm_ctx"]
    assert fsdp.fully_shard is somebody_elses


def test_nothing_is_installed_if_that_warning_is_an_error():
    fsdp.fully_shard = somebody_elses
    with pytest.raises(UserWarning, match="somebody_elses"):  # warnings are errors in this suite
        composable_shard.install()
    assert fsdp.share_comm_ctx is TORCHS["share_comm_ctx"]
    assert not machinery._holders


def test_uninstall_keeps_a_function_that_other_code_has_set_and_warns(module):
    module.shard = module.missing = TORCHS["fully_shard"]
    composable_shard.install()
    fsdp.fully_shard = module.shard = somebody_elses
    del module.missing
    with pytest.warns(
        UserWarning, match="torch.distributed.fsdp.fully_shard is test_install.somebody_elses now"
    ) as seen:
        composable_shard.uninstall()
    (warning,) = seen
    assert "a_library_of_others.shard" in str(warning.message)
    assert warning.filename == __file__
    assert fsdp.fully_shard is module.shard is somebody_elses
    assert fsdp.share_comm_ctx is TORCHS["share_comm_ctx"]
    assert not hasattr(module, "missing")


def test_uninstall_keeps_names_that_were_set_to_ours_manually():
    fsdp.fully_shard = OURS["fully_shard"]
    with composable_shard.install():
        pass
    assert fsdp.fully_shard is OURS["fully_shard"]
    assert fsdp.share_comm_ctx is TORCHS["share_comm_ctx"]


# ---- sharding while installed


def steps(shard, register):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        shard(layer)
    shard(model)
    register(model, "forward")
    found = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert all(isinstance(param, DTensor) for param in model.parameters())
    return model, found


@distributed(world=2)
def test_models_sharded_by_torchs_name_use_our_engine_with_the_same_results(rank, world):
    assert dist.is_initialized()
    theirs, want = steps(fsdp.fully_shard, fsdp.register_fsdp_forward_method)
    with composable_shard.install():
        ours, found = steps(fsdp.fully_shard, fsdp.register_fsdp_forward_method)
        fsdp.share_comm_ctx([fsdp.fully_shard(nn.Linear(2, 2)) for _ in range(2)])
        assert fsdp.fully_shard.state(ours) is not None
    assert not isinstance(theirs, composable_shard.FSDPModule)
    assert isinstance(ours, composable_shard.FSDPModule)
    assert isinstance(ours, fsdp.FSDPModule)
    assert found == pytest.approx(want, abs=1e-6)
    ours(torch.ones(2, 4)).sum().backward()  # works after the context too
    theirs(torch.ones(2, 4)).sum().backward()


@simulated(world=2)
def test_install_does_not_change_torchs_replicate(rank, world):
    if rank == 0:  # threads share torch's names
        composable_shard.install()
    dist.barrier()
    model = replicate(nn.Sequential(nn.Linear(4, 4)))
    model(torch.ones(2, 4)).sum().backward()
    assert not isinstance(model, composable_shard.FSDPModule)
    dist.barrier()
    if rank == 0:
        composable_shard.uninstall()


def test_compiled_code_uses_the_currently_installed_functions():
    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x):
        return x + 1 if fsdp.fully_shard is OURS["fully_shard"] else x - 1

    one = torch.ones(1)
    for _ in range(2):
        assert compiled(one).item() == 0
        with composable_shard.install():
            assert compiled(one).item() == 2
    assert compiled(one).item() == 0
    torch._dynamo.reset()


FRESH = """
import torch.distributed.fsdp as fsdp, torch.distributed as dist
before = dict(vars(fsdp))
import composable_shard
assert dict(vars(fsdp)) == before, "the import has patched torch"
assert not any(name.startswith("composable_shard.cli") for name in __import__("sys").modules)
composable_shard.uninstall()
assert dict(vars(fsdp)) == before
composable_shard.install()  # before there is a process group
from torch.distributed.fsdp import *
from torch.distributed._composable.fsdp import fully_shard as composable  # loaded after it
from torch.testing._internal.distributed.fake_pg import FakeStore
assert not dist.is_initialized()
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
import torch
model = fully_shard(torch.nn.Linear(4, 4))
assert isinstance(model, composable_shard.FSDPModule) and composable is fully_shard
dist.destroy_process_group()
composable_shard.uninstall()
assert dict(vars(fsdp)) == before and composable is fully_shard is before["fully_shard"]
"""


def test_importing_patches_nothing_and_install_works_before_the_process_group_exists():
    subprocess.run([sys.executable, "-W", "ignore", "-c", FRESH], check=True, timeout=120)


# ---- modules sharded by both implementations


def pair():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def mixed(*words):
    return pytest.raises(
        composable_shard.errors.MixedShardingError, match=".*".join((*words, r"composable_shard\.install\(\)"))
    )


@pytest.mark.parametrize("named", [False, True], ids=["default mesh", "submeshes"])
@simulated(world=4)
def test_nesting_modules_sharded_by_both_implementations_raises_an_error(rank, world, named):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    inner, outer = ({"mesh": mesh["a"]}, {"mesh": mesh["b"]}) if named else ({}, {})
    theirs, ours = TORCHS["fully_shard"], OURS["fully_shard"]
    model = pair()
    theirs(model[0], **inner)
    with mixed("module 0 of this Sequential was sharded by torch's own"):
        ours(model, **outer)
    with mixed("module 0 of this Sequential"):
        ours(model, ignored_params=set(model[0].parameters()), **outer)
    with mixed("this FSDPLinear was sharded by torch's own"):
        ours(model[0], **outer)
    model = pair()
    ours(model[0], **inner)
    with mixed("contains this FSDPLinear, which composable_shard has"):
        theirs(model, **outer)
    model = theirs(pair(), **inner)
    with mixed("this Linear is inside of one that torch's FSDP"):
        ours(model[0], **outer)
    with pytest.raises(ValueError, match="install"):  # also a ValueError
        ours([model[0], model[1]], **outer)


@simulated(world=2)
def test_a_module_sharded_by_torch_and_added_later_raises_an_error_in_forward(rank, world):
    model = composable_shard.fully_shard(pair())
    model.append(TORCHS["fully_shard"](nn.Linear(4, 4)))
    with mixed("module 2 of this FSDPSequential"):
        model(torch.ones(1, 4))


@simulated(world=2)
def test_a_model_that_a_library_marks_as_sharded_runs(rank, world):
    """Transformers 5 marks models that it has sharded, for `generate`."""
    model = pair()
    for module in (*model, model):
        OURS["fully_shard"](module)
    model._is_fsdp_managed_module = True
    for root in (model, OURS["fully_shard"](nn.Sequential(copy.deepcopy(model), nn.Linear(4, 4)))):
        root(torch.ones(2, 4)).sum().backward()


@simulated(world=2)
def test_separate_modules_sharded_by_both_implementations_work(rank, world):
    model = pair()
    TORCHS["fully_shard"](model[0])
    OURS["fully_shard"](model[1])
    model(torch.ones(2, 4)).sum().backward()
    assert all(isinstance(param.grad, DTensor) for param in model.parameters())


@simulated(world=2)
def test_ours_works_inside_of_torchs_replicate_and_around_it(rank, world):
    model = pair()
    OURS["fully_shard"](model[0])
    replicate(model)
    model(torch.ones(2, 4)).sum().backward()
    model = pair()
    replicate(model[0])
    OURS["fully_shard"](model)
    model(torch.ones(2, 4)).sum().backward()


@simulated(world=2)
def test_a_partial_of_torchs_function_raises_the_same_error(rank, world):
    shard = functools.partial(TORCHS["fully_shard"])
    model = pair()
    shard(model[0])
    with mixed("module 0"):
        OURS["fully_shard"](model)
