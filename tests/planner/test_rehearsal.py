"""Rehearsals: the memory of programs with fake tensors is that of the same programs with real tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import composable_shard as cs
from _blocks import Transformer, next_token_loss
from composable_shard import testing
from composable_shard._torch.core import has_memory
from composable_shard._torch.tracing import shapes_apart
from composable_shard.cli import main as command_line
from composable_shard.cli.estimate import tables
from composable_shard.cli.program import NotFoundError
from composable_shard.cli.terminal import show
from composable_shard.planner.live import LiveBytes
from composable_shard.planner.memory import Bytes
from composable_shard.planner.off_device import Offloaded
from composable_shard.planner.rehearsal import Rehearsal, rehearse

SHARDS = {"none": None, "ours": cs.fully_shard, "fsdp2": torch_fully_shard}
STEPS = 2
LENGTH = 32


def train(engine="none", checks=lambda model, loss: None, steps=STEPS + 1):
    """A training script, as under a launcher."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Transformer(dim=64, layers=2, hidden=128, length=LENGTH)
    if (shard := SHARDS[engine]) is not None:
        for block in model.blocks:
            shard(block)
        shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(steps):
        loss = next_token_loss(model, torch.randint(0, 37, (8, LENGTH + 1)))
        loss.backward()
        checks(model, loss)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("engine", SHARDS)
def test_the_peak_matches_a_real_run(engine, monkeypatch):
    rehearsed = rehearse(lambda: train(engine), 4, STEPS)
    with testing.fake(4), shapes_apart(), LiveBytes() as counter:
        monkeypatch.setattr(dist, "init_process_group", lambda backend: None)
        train(engine, steps=STEPS)
    assert (rehearsed.ranks, rehearsed.steps, rehearsed.guessed) == (4, STEPS, ())
    assert abs(rehearsed.peak.total - counter.peak) < 0.005 * counter.peak
    whole = 4 * sum(each.numel() for each in Transformer(dim=64, layers=2, hidden=128).parameters())
    shards, peak = (1 if engine == "none" else 4), rehearsed.peak
    assert (peak.parameters, peak.optimizer) == pytest.approx((whole / shards, 2 * whole / shards), rel=0.01)
    assert (peak.unsharded > whole / 4) == (engine == "ours")


def test_gradients_are_counted_at_the_peak():
    def program():
        weight = torch.nn.Parameter(torch.zeros(1000))
        optimizer = torch.optim.SGD([weight])
        for _ in range(4):
            weight.sum().backward()
            torch.empty(5000)
            optimizer.step()
            optimizer.zero_grad()

    peak = rehearse(program).peak
    assert (peak.parameters, peak.gradients, peak.optimizer) == (4000, 4000, 0)
    assert 20000 <= peak.activations < 20100


def test_the_peak_may_be_the_unsharded_model():
    def program(device="cpu"):
        with torch.device(device):
            model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(8)))
        for layer in model:
            cs.fully_shard(layer)
        cs.fully_shard(model)
        model.to_empty(device="cpu")
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            model(torch.randn(1, 64)).sum().backward()
            optimizer.step()

    rehearsed = rehearse(program, 64, steps=2)
    whole = 8 * 64 * 64 * 4
    assert (rehearsed.step, rehearsed.phase) == (1, "forward")
    assert (rehearsed.peak.optimizer, rehearsed.peak.unsharded) == (0, 0)
    assert whole <= rehearsed.peak.total < 1.2 * whole
    on_meta = rehearse(lambda: program("meta"), 64, steps=2)
    assert (on_meta.step, on_meta.phase) != (1, "forward")
    assert on_meta.peak.total < 0.6 * whole


def test_a_program_sees_its_ranks_and_small_tensors_keep_their_values():
    seen = {}

    def look(model, loss):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        votes = torch.tensor([3.0, 0.0])
        dist.all_reduce(votes)
        names = [None] * 8
        dist.all_gather_object(names, {"rank": dist.get_rank()})
        seen.update(
            world=(os.environ["RANK"], os.environ["WORLD_SIZE"], dist.get_rank(), dist.get_world_size()),
            coordinate=mesh["shard"].get_coordinate(),
            votes=votes.tolist(),
            lengths=torch.arange(5).cumsum(0).tolist(),
            loss=(loss.item(), bool(torch.isnan(loss)), loss.detach().numpy().shape, f"{loss:.1f}"),
            names=names[7],
            fake=not has_memory(model.head.weight),
        )

    rehearse(lambda: train(checks=look), 8, steps=1)
    assert seen == {
        "world": ("0", "8", 0, 8),
        "coordinate": (0,),
        "votes": [3.0, 0.0],
        "lengths": [0, 1, 3, 6, 10],
        "loss": (1.0, False, (), "1.0"),
        "names": {"rank": 0},
        "fake": True,
    }


def test_windows_at_random_positions_have_the_right_size():
    text, widths = torch.arange(1 << 17), []

    def look(model, loss):
        begins = torch.randint(len(text) - 9, (2, 4), generator=torch.Generator().manual_seed(3))[0]
        widths.extend(len(text[at : at + 9]) for at in begins)
        assert sorted(torch.randperm(6).tolist()) == list(range(6))
        begins = [int(at) for at in begins]
        assert len(set(begins)) == 4, begins

    rehearse(lambda: train(checks=look), 8, steps=1)
    assert set(widths) == {9}


@pytest.mark.matrix
def test_outputs_that_depend_on_values_are_as_large_as_they_can_be():
    sizes = []

    def choose(model, loss):
        scores = torch.randn(40, 8)
        sizes.append((scores[scores > 0].shape, torch.nonzero(scores).shape))

    assert rehearse(lambda: train(checks=choose), steps=1).guessed == ("aten.index", "aten.nonzero")
    assert set(sizes) == {((320,), (320, 2))}


def test_programs_see_fake_tensors_as_real_tensors():
    seen = {}

    def look(model, loss):
        weights = list(model.parameters())
        addresses = [each.data_ptr() for each in weights]
        again = [each.data_ptr() for each in model.state_dict().values()]
        seen.update(
            apart=len({*addresses}) == len(weights),
            again=addresses == again,
            view=model.head.weight[1:].data_ptr() - model.head.weight.data_ptr(),
            is_fake=isinstance(loss, torch._subclasses.FakeTensor),
        )

    rehearse(lambda: train(checks=look), steps=1)
    assert seen == {"apart": True, "again": True, "view": 4 * 64, "is_fake": False}
    assert isinstance(FakeTensorMode().from_tensor(torch.ones(1)), torch._subclasses.FakeTensor)


def test_data_loaders_make_batches_without_workers():
    def program(**settings):
        weight = torch.nn.Parameter(torch.zeros(8))
        optimizer = torch.optim.SGD([weight])
        data = torch.utils.data.TensorDataset(torch.randn(24, 8))
        for _ in range(2):
            for (batch,) in torch.utils.data.DataLoader(data, batch_size=8, **settings):
                (batch * weight).sum().backward()
                optimizer.step()

    with_workers = {"num_workers": 1, "timeout": 20, "persistent_workers": True, "prefetch_factor": 3}
    assert rehearse(lambda: program(**with_workers), steps=5) == rehearse(program, steps=5)


@pytest.mark.matrix
def test_pools_of_earlier_programs_do_not_count():
    kept = []
    peaks = [rehearse(lambda: train("ours", lambda model, _: kept.append(model)), 4, 1).peak for _ in range(2)]
    assert peaks[0] == peaks[1]
    assert peaks[0].unsharded > 0


@pytest.mark.matrix
def test_compiled_models_count_like_eager_models():
    def program(compiles):
        model = Transformer(dim=64, length=LENGTH)
        optimizer = torch.optim.SGD(model.parameters())
        call = torch.compile(model) if compiles else model
        for _ in range(3):
            next_token_loss(call, torch.randint(0, 37, (2, LENGTH + 1))).backward()
            optimizer.step()

    assert rehearse(lambda: program(True)).peak == rehearse(lambda: program(False)).peak


def test_nothing_is_saved_and_all_patches_are_undone(tmp_path):
    file = tmp_path / "weights.pt"
    names = [(dist, "init_process_group"), (torch, "save"), (torch.Tensor, "numpy"), (torch.amp.GradScaler, "step")]
    before = [getattr(*name) for name in names]

    def save(model, loss):
        torch.save(model.state_dict(), file)
        cs.checkpoint.save(tmp_path / "run", {"model": model}, step=1)

    rehearse(lambda: train("ours", save), 2, steps=1)
    assert list(tmp_path.iterdir()) == []
    assert [getattr(*name) for name in names] == before
    assert not dist.is_initialized()
    assert "WORLD_SIZE" not in os.environ
    torch.save(torch.ones(2), file)
    assert torch.load(file).numpy().tolist() == [1.0, 1.0]


def test_a_program_that_does_not_train_is_an_error_and_its_own_errors_are_raised():
    with pytest.raises(cs.errors.ShardConfigStateError, match="ended before any optimizer stepped"):
        rehearse(lambda: torch.ones(3))
    with pytest.raises(ZeroDivisionError):
        rehearse(lambda: 1 / 0)
    with pytest.raises(cs.errors.ShardConfigValueError, match="steps"):
        rehearse(train, steps=0)
    with pytest.raises(SystemExit):
        rehearse(lambda: sys.exit("no data"))
    assert rehearse(lambda: (train(steps=1), sys.exit(0))).steps == 1


# ---------------------------------------------------------------------- the command

SCRIPT = """\
import sys

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

width = int(sys.argv[1])
torch.distributed.init_process_group()
model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
while True:
    loss = model(torch.randn(64, width)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
"""


def command(*arguments, cwd):
    call = [sys.executable, "-m", "composable_shard", "estimate", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(cs.__file__).parents[1])}
    return subprocess.run(call, capture_output=True, text=True, cwd=cwd, env=environment, timeout=120, check=False)


def test_the_command_runs_an_unchanged_script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = command("--devices", "8", "--install", "train.py", "256", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["loss 1.0"] * 3
    assert_expected_inline(
        done.stdout,
        """\
Peak memory of 1 of 8 ranks: before the backward of step 2
  parameters                              131.6 kB  7%
  gradients                               0 bytes   0%
  optimizer                               263.2 kB  15%
  unsharded parameters and communication  527.4 kB  30%
  activations and other tensors           855.1 kB  48%
  total                                   1.8 MB    100%

Notes
  3 steps ran; the allocator of a device reserves more memory than tensors use: see advise
""",
    )


def test_the_command_names_the_line_of_a_script_that_fails(tmp_path, monkeypatch, capsys):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    assert command_line.main(["estimate", str(script), "many"]) == 2
    place = f"{script}:7"
    assert capsys.readouterr().err.endswith(
        f"estimate: {place}: ValueError: invalid literal for int() with base 10: 'many'\n"
    )


SMALL = "layers=1,width=64,heads=4,vocabulary=128,sequence=64"


@pytest.mark.matrix
def test_the_command_accepts_the_same_models_as_advise(capsys):
    arguments = ["estimate", "--devices", "4", "--strategy", "hsdp", "--precision", "float32"]
    assert command_line.main([*arguments, "--json", "--memory", "100kB", SMALL]) == 1
    content = json.loads(capsys.readouterr().out)
    assert (content.pop("fits"), content.pop("total")) == (False, sum(content["peak"].values()))
    offloaded = Offloaded(**content["offloaded"])
    seen = Rehearsal(**{**content, "peak": Bytes(**content["peak"]), "offloaded": offloaded})
    show(tables(seen))
    assert_expected_inline(
        capsys.readouterr().out,
        """\
Peak memory of 1 of 4 ranks: in the backward of step 3
  parameters                              164.2 kB  11%
  gradients                               0 bytes   0%
  optimizer                               328.5 kB  23%
  unsharded parameters and communication  281.1 kB  19%
  activations and other tensors           678.5 kB  47%
  total                                   1.5 MB    100%

Notes
  3 steps ran; the allocator of a device reserves more memory than tensors use: see advise
""",
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.py"], "can't open file 'nowhere.py'"),
        (["--devices", "3", "--strategy", "hsdp", SMALL], "replicas: 3 devices cannot be divided evenly"),
        (["--devices", "0", SMALL], "devices: 0 is not a number above 0"),
        (["--strategy", "none", "--offload", "all", SMALL], "offload: 'all' needs sharded modules"),
        (["--precision", "int1", SMALL], "precision: 'int1' is not one of float32"),
    ],
)
def test_invalid_arguments_give_an_error_of_one_line(arguments, said, capsys):
    assert command_line.main(["estimate", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    with pytest.raises((cs.errors.ShardConfigValueError, NotFoundError)):
        command_line.main(["estimate", "--debug", *arguments])
