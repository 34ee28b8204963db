"""`testing.races` finds accesses that no event orders, and nothing else."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch
from composable_shard import errors, testing
from composable_shard._torch.distributed import local_tensor


def pairs(checked):
    """The operators and streams of each race."""
    return [(str(race.first), str(race.then)) for race in checked.races]


def text_of(checked):
    """The report without the parts that differ between runs."""
    return re.sub(r"0x[0-9a-f]+", "0x...", re.sub(r"test_races.py:\d+", "test_races.py", checked.report()))


@pytest.mark.parametrize("fenced", [False, True])
def test_a_missing_wait_between_two_streams_is_a_race(fenced):
    with testing.races(2, check=False) as checked:
        table = torch.zeros(4, 4)
        side = checked.stream("mine")
        side.wait_stream(checked.stream_of_compute)
        with side:
            table[:, 1:3].fill_(1)
        if fenced:
            torch.accelerator.current_stream().wait_stream(side)
        table.sum()
    if fenced:
        assert checked.races == ()
        return
    assert_expected_inline(
        text_of(checked),
        """\
1 race: accesses to the same memory that no event orders
float32 [4, 4]: bytes 4 to 12 of the allocation, at 0x...
  first aten.fill_.Scalar writes on stream 'mine'
        test_races.py test_a_missing_wait_between_two_streams_is_a_race
  then  aten.sum.default reads on stream 'compute'
        test_races.py test_a_missing_wait_between_two_streams_is_a_race
  missing: stream 'compute' has to wait for an event that was recorded on stream 'mine' after aten.fill_.Scalar""",
    )
    [race] = checked.races
    assert (race.shape, race.dtype, race.offset, race.nbytes) == ((4, 4), torch.float32, 4, 8)
    assert (race.first.stream, race.then.stream) == ("mine", "compute")
    assert race.first.writes
    assert not race.then.writes


@pytest.mark.parametrize("fenced", [False, True])
def test_a_custom_operator_is_checked_as_the_operators_that_it_calls(fenced):
    with testing.races(2, check=False) as checked:
        side = checked.stream("mine")

        @torch.library.custom_op("composable_shard_tests::twice", mutates_args=())
        def twice(x: torch.Tensor) -> torch.Tensor:
            if fenced:
                side.wait_stream(torch.accelerator.current_stream())
            with side:
                result = x * 2
            if fenced:
                torch.accelerator.current_stream().wait_stream(side)
                result.record_stream(torch.accelerator.current_stream())
            return result

        twice.register_autograd(lambda _, grad: grad * 2)
        x = torch.zeros(4, requires_grad=True)
        output = twice(x + 1).sum()
        output.backward()
    if fenced:
        assert checked.races == ()
    else:
        assert pairs(checked)[:2] == [
            ("aten.add.Tensor writes on stream 'compute'", "aten.mul.Tensor reads on stream 'mine'"),
            ("aten.mul.Tensor writes on stream 'mine'", "aten.sum.default reads on stream 'compute'"),
        ]
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 4


def test_accesses_to_different_bytes_and_two_reads_are_no_race():
    with testing.races(2):
        table = torch.zeros(4, 4)
        side = torch.Stream()
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            table[:, :2].fill_(1)
            table[:, 2:].sum()
        table[:, 2:].sum()


@pytest.mark.parametrize("names", [torch, torch.cuda, torch.cpu], ids=["torch", "cuda", "cpu"])
@pytest.mark.parametrize("waits", [True, False])
def test_streams_and_events_under_all_of_torchs_names_are_tracked(names, waits):
    with testing.races(2, check=False) as checked:
        table = torch.zeros(4)
        side, ready = names.Stream(), names.Event()
        ready.record()
        side.wait_event(ready)
        within = side if names is torch else names.stream(side)
        with within:
            assert torch.accelerator.current_stream() is side
            table.add_(1)
            done = side.record_event()
        assert torch.accelerator.current_stream() is checked.stream_of_compute
        if waits:
            done.wait()
        table.add_(1)
    writes = [("aten.add_.Tensor writes on stream 'stream'", "aten.add_.Tensor writes on stream 'compute'")]
    assert pairs(checked) == ([] if waits else writes)


def test_work_that_the_host_has_waited_for_is_ordered_before_later_launches():
    with testing.races(2):
        table = torch.zeros(4)
        side, other = torch.cuda.Stream(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            table.add_(1)
        side.synchronize()
        with torch.cuda.stream(other):
            table.add_(1)
        torch.accelerator.synchronize()
        table.sum()


def test_freeing_memory_that_another_stream_uses_is_a_race_with_the_next_allocation():
    with testing.races(2, check=False) as checked:
        side = checked.stream("mine")
        table = torch.zeros(4)
        side.wait_stream(checked.stream_of_compute)
        with side:
            table.sum()
        del table
        assert checked.races == ()
        torch.ones(1000)  # the size differs, because the allocator may split and merge blocks
    [race] = checked.races
    assert race.reuses
    assert_expected_inline(
        text_of(checked),
        """\
1 race: accesses to the same memory that no event orders
float32 [4]: bytes 0 to 16 of the allocation, at 0x...
  first aten.sum.default reads on stream 'mine'
        test_races.py test_freeing_memory_that_another_stream_uses_is_a_race_with_the_next_allocation
  then  aten.ones.default on stream 'compute' may reuse the memory, which was freed
        test_races.py test_freeing_memory_that_another_stream_uses_is_a_race_with_the_next_allocation
  missing: stream 'compute' has to wait for an event that was recorded on stream 'mine' after aten.sum.default
           before the tensor is freed; or call tensor.record_stream for that stream""",
    )


@pytest.mark.parametrize("way", ["waits", "records", "frees on the same stream", "empties the storage after a wait"])
def test_freeing_memory_after_its_last_use_is_no_race(way):
    with testing.races(2):
        side, compute = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(compute)
        with torch.cuda.stream(side if way == "frees on the same stream" else compute):
            table = torch.zeros(4)
        side.wait_stream(compute)
        with torch.cuda.stream(side):
            table.sum()
        if way == "records":
            table.record_stream(side)
        elif way != "frees on the same stream":
            compute.wait_stream(side)
        if way.startswith("empties"):
            table.untyped_storage().resize_(0)
        else:
            del table
        torch.ones(4)


def test_emptying_a_storage_that_another_stream_uses_is_a_race():
    with testing.races(2, check=False) as checked:
        side = checked.stream("mine")
        table = torch.zeros(4)
        side.wait_stream(checked.stream_of_compute)
        with side:
            table.sum()
        table.untyped_storage().resize_(0)
        torch.ones(4)
    assert [race.reuses for race in checked.races] == [True]


def test_other_streams_must_use_new_memory_after_its_allocation():
    with testing.races(2, check=False) as checked:
        side = checked.stream("mine")
        torch.ones(4)
        table = torch.empty(4)  # may reuse the memory of `ones`
        with side:
            table.fill_(1)
    assert pairs(checked) == [
        ("aten.empty.memory_format writes on stream 'compute'", "aten.fill_.Scalar writes on stream 'mine'")
    ]


# ---- autograd


def test_backward_runs_on_the_streams_of_forward_with_the_waits_of_autograd():
    with testing.races(2):
        side, compute = torch.cuda.Stream(), torch.cuda.current_stream()
        weight = torch.ones(4, 4, requires_grad=True)
        seen = []
        x = torch.ones(2, 4) @ weight
        side.wait_stream(compute)
        with torch.cuda.stream(side):
            y = (x.sin() * x).exp()
            y.register_hook(lambda gradient: seen.append(torch.cuda.current_stream()))
        compute.wait_stream(side)
        (y + x).sum().backward()
        assert seen == [side]
        assert torch.cuda.current_stream() is compute
        weight.grad.sum()
        [gradient] = torch.autograd.grad((torch.ones(2, 4) @ weight).sum(), weight)
        gradient.sum()


def test_a_hook_that_uses_its_own_stream_without_waits_is_a_race():
    with testing.races(2, check=False) as checked:
        side, norms = checked.stream("mine"), []

        def hook(gradient):
            with side:
                norms.append(gradient.norm())

        weight = torch.ones(4, 4, requires_grad=True)
        y = torch.ones(2, 4) @ weight
        y.register_hook(hook)
        y.sum().backward()
    assert [(race.first.stream, race.then.stream) for race in checked.races] == [("compute", "mine")]
    assert checked.races[0].then.place.user.endswith(" hook")
    assert checked.races[0].then.place.node == "MmBackward0"


def test_only_the_stream_that_calls_backward_waits_for_leaves():
    with testing.races(2, check=False) as checked:
        side, compute = checked.stream("mine"), checked.stream_of_compute
        weight = torch.ones(4, requires_grad=True)
        side.wait_stream(compute)
        with side:
            y = weight * 2
        compute.wait_stream(side)
        y.sum().backward()
        weight.grad.sum()  # on compute, which called backward
        assert checked.races == ()
        other = checked.stream("other")
        with other:
            weight.grad.sum()
    assert {race.then.stream for race in checked.races} == {"other"}


def test_after_a_failed_backward_the_stream_of_the_caller_is_current():
    def fail(_):
        raise ZeroDivisionError

    with testing.races(2) as checked:
        weight = torch.ones(4, requires_grad=True)
        side = checked.stream("mine")
        side.wait_stream(checked.stream_of_compute)
        with side:
            y = weight * 2
        y.register_hook(fail)
        checked.stream_of_compute.wait_stream(side)
        with pytest.raises(ZeroDivisionError):
            y.sum().backward()
        assert torch.cuda.current_stream() is checked.stream_of_compute


# ---- collectives, models


def test_a_collective_runs_on_the_stream_of_its_group_until_it_is_waited_for():
    with testing.races(4, check=False, mesh={"a": 2, "b": 2}) as checked:
        table = torch.ones(4)
        work = dist.all_reduce(table, async_op=True)
        table.sum()
        work.wait()
        table.sum()
        dist.all_reduce(table, group=checked.mesh.get_group("b"))
        assert table.tolist() == [8.0] * 4
    assert pairs(checked) == [("all_reduce writes on stream 'network'", "aten.sum.default reads on stream 'compute'")]


def test_dtensors_are_checked_as_the_operators_and_collectives_that_they_call():
    with testing.races(2) as checked:
        table = distribute_tensor(torch.ones(4, 4), checked.mesh, [Shard(0)])
        assert isinstance(table, DTensor)
        before = checked.operators
        (table * 2).redistribute(placements=[Replicate()]).sum().full_tensor()
        assert checked.operators > before + 2


def sharded(checked):
    torch.manual_seed(0)
    model = Transformer()
    for block in model.blocks:
        cs.fully_shard(block, mesh=checked.mesh)
    return cs.fully_shard(model, mesh=checked.mesh)


def test_a_race_in_a_sharded_model_names_the_parameter():
    with testing.races(2, check=False) as checked:
        model, side = sharded(checked), checked.stream("mine")

        def look(module, *_):
            with side:
                module.weight.norm()

        model.blocks[1].feed_forward.down.register_forward_hook(look)
        next_token_loss(model, *token_batch(0, 0)).backward()
        with side:
            local_tensor(model.blocks[0].attention.q.weight).zero_()
    names = {race.name for race in checked.races if race.then.stream == "mine"}
    assert names == {"weight blocks.1.feed_forward.down.weight", "shard blocks.0.attention.q.weight"}


def losses(mesh):
    torch.manual_seed(0)
    model = Transformer()
    for block in model.blocks:
        cs.fully_shard(block, mesh=mesh)
    cs.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    values = []
    for step in range(3):
        loss = next_token_loss(model, *token_batch(0, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    return values


def test_losses_match_those_of_identical_ranks_without_the_checker():
    with testing.fabric(4, latency_s=1e-6, bandwidth_Bps=1e9, clock="streams"):
        alike = losses(init_device_mesh("cpu", (4,)))
    with testing.races(4) as checked:
        assert losses(checked.mesh) == pytest.approx(alike, rel=1e-5)


def test_the_host_must_wait_before_it_uses_shards_on_the_host():
    with testing.races(2, check=False) as checked:
        pinned, table = torch.zeros(4), torch.ones(4)
        checked.on_host(pinned)
        pinned.copy_(table, non_blocking=True)
        event = torch.accelerator.current_stream().record_event()
        pinned.mul_(2)
        event.synchronize()
        pinned.mul_(2)
    assert {(race.first.stream, race.then.stream) for race in checked.races} == {("compute", "host")}


# ---- the block


def race_with(checked):
    table = torch.zeros(4)
    with checked.stream("mine"):
        table.add_(1)


def fail_after(_):
    raise ZeroDivisionError


def test_the_end_of_the_block_raises_an_error_unless_there_is_another_one():
    with pytest.raises(errors.RaceError, match=r"1 race: .*\nfloat32 \[4\]"), testing.races(2) as checked:
        race_with(checked)
    with pytest.raises(ZeroDivisionError), testing.races(2) as checked:
        fail_after(race_with(checked))
    with testing.races(2, check=False) as checked:
        race_with(checked)
        with pytest.raises(errors.RaceError):
            checked.check()
    assert checked.report().startswith("1 race")


def test_a_race_is_reported_once_and_only_the_first_races_in_full():
    with testing.races(2, check=False) as checked:
        table = torch.zeros(4)
        for _ in range(5):
            with checked.stream("mine"):
                table.sum()
        for number in range(12):
            with checked.stream(f"stream {number}"):
                table.sum()
    assert len(checked.races) == 13
    assert checked.report().endswith("and 5 more")


def test_the_end_of_the_block_restores_torch_and_its_streams_then_raise_an_error():
    names = [(torch, "Stream"), (torch, "Event"), (torch.cuda, "stream"), (torch.accelerator, "current_stream")]
    names += [(torch.Tensor, "record_stream"), (torch.UntypedStorage, "resize_"), (torch.cpu, "Stream")]
    before = [getattr(*name) for name in names]
    with testing.races(2) as checked:
        side = checked.stream("mine")
        event = side.record_event()
    assert [getattr(*name) for name in names] == before
    assert not dist.is_initialized()
    with pytest.raises(
        cs.errors.ShardConfigStateError, match="after the end of its block; create new ones in the block"
    ):
        event.wait()
    with pytest.raises(cs.errors.ShardConfigStateError, match="after the end of its block"):
        checked.stream("another")


def enter(context):
    with context:
        pass


def test_invalid_arguments_of_races_raise_an_error():
    with pytest.raises(cs.errors.ShardConfigValueError, match="at least 1 rank"), testing.races(0):
        pass
    with testing.races(2), pytest.raises(cs.errors.ShardConfigStateError, match="has a default process group"):
        enter(testing.races(2))
    with testing.races(2) as checked, pytest.raises(cs.errors.ShardConfigValueError, match="name: expected a name"):
        checked.stream("")


# ---- the docs


PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()


def test_the_example_in_the_docs_prints_the_report_in_the_docs(tmp_path):
    (report,) = re.findall(r"^```text\n(.*?)^```$", PAGE, re.M | re.S)
    blocks = re.findall(r"^```python notest\n(.*?)^```$", PAGE, re.M | re.S)
    (script,) = [block for block in blocks if "testing.races(" in block]
    file = tmp_path / "train.py"
    file.write_text(script)
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(compile(script, str(file), "exec"), {})
    assert anyhow(shown.getvalue()) == anyhow(report)
    current = "torch.accelerator.current_stream()"
    mended = script.replace("        with side:", f"        side.wait_stream({current})\n        with side:")
    mended = mended.replace("    optimizer.zero_grad", f"    {current}.wait_stream(side)\n    optimizer.zero_grad")
    with contextlib.redirect_stdout(shown := io.StringIO()):
        exec(mended, {})
    assert shown.getvalue().strip() == ""


def anyhow(text):
    """The report without addresses and line numbers of the library."""
    return re.sub(r"0x[0-9a-f]+", "0x...", re.sub(r"(composable_shard/\S+):\d+", r"\1", text)).strip()
