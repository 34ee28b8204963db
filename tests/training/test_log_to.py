"""`log_to`: metrics of steps, with all types of loggers."""

from __future__ import annotations

import gc
import io
import json
import logging
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import composable_shard as cs
from _engines import mesh_of
from _models import Stack
from _pool import simulated
from _stepping import loss_of, twins
from composable_shard._integrations import loggers
from composable_shard.testing import Busy, fabric, spmd


class Writer:
    """A logger like TensorBoard's SummaryWriter."""

    def __init__(self):
        self.scalars = []

    def add_scalar(self, tag, scalar_value, global_step=None, walltime=None):
        self.scalars.append((tag, scalar_value, global_step))


class Run:
    """A logger like a run of Weights & Biases."""

    def __init__(self):
        self.logged = []

    def log(self, data, step=None, commit=None):
        self.logged.append((step, data))


class Logger:
    """A logger like Lightning's."""

    def __init__(self):
        self.logged = []

    def log_metrics(self, metrics, step=None):
        self.logged.append((step, metrics))

    def log(self, *_):
        raise AssertionError("`log_metrics` has precedence over `log`")


class Trained:
    """A sharded model in training. `told` contains the logged metrics by step."""

    def __init__(self, logger=None, **options):
        self.model, _ = twins(mesh=mesh_of(2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.told = {}
        self.log = cs.report.log_to(self.model, logger or self.note, **options)

    def note(self, figures, step):
        self.told[step] = figures

    def step(self, number=0, clips=False, skips=False, **figures):
        loss = loss_of(self.model, number)
        loss.backward()
        if clips:
            self.norm = cs.clip_grad_norm_(self.model.parameters(), 1.0)
        if not skips:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.log.step(loss=loss, **figures)
        return loss


@pytest.fixture
def seconds(monkeypatch):
    """A clock that advances by a second at each reading."""
    now = iter(range(1000))
    monkeypatch.setattr(loggers, "clock", lambda: float(next(now)))


def figures_in(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@simulated(world=2)
def test_metrics_contain_the_values_of_the_step_and_of_the_model(rank, world):
    trained = Trained(rank=None)
    losses = [trained.step(number, clips=True, tokens=20, lr=0.5) for number in range(3)]
    assert list(trained.told) == [1, 2, 3]
    figures = trained.told[3]
    assert all(type(name) is str and type(value) is float for name, value in figures.items())
    assert figures["train/loss"] == losses[-1].item()
    assert figures["train/grad_norm"] == trained.norm.full_tensor().item()
    assert (figures["train/skipped_steps"], figures["lr"]) == (0, 0.5)
    assert figures.items() >= cs.stats(trained.model).items()
    assert figures["step/seconds"] > 0
    assert figures["step/tokens_per_second"] == pytest.approx(20 / figures["step/seconds"])
    assert not {"step/seconds", "step/tokens_per_second"} & trained.told[1].keys(), "the first step has no start time"


def test_rates_are_means_since_the_last_logged_step(seconds):
    @simulated(world=1)
    def test(rank, world):
        model = cs.fully_shard(Stack(1), mesh=mesh_of(1))
        told = {}
        log = cs.report.log_to(model, lambda figures, step: told.update({step: figures}), every=4)
        for tokens in (1000, 1, 2, 3, 4, 5, 6, torch.tensor(7)):
            log.step(tokens=tokens)
        assert [told[step]["step/tokens_per_second"] for step in (4, 8)] == [(1 + 2 + 3) / 3, (4 + 5 + 6 + 7) / 4]
        assert [told[step]["step/seconds"] for step in (4, 8)] == [1, 1]
        assert "train/loss" not in told[4]

    test()


@simulated(world=2)
def test_steps_without_an_optimizer_step_are_counted_as_skipped(rank, world):
    trained = Trained(rank=None)
    other = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    for number, skips in enumerate((False, True, False, True)):
        other.step()
        trained.step(number, skips=skips)
    assert [figures["train/skipped_steps"] for figures in trained.told.values()] == [0, 1, 1, 2]
    trained.step(skipped=torch.tensor(1.0))
    trained.step(skipped=True)
    trained.step(skipped=False)
    assert [trained.told[step]["train/skipped_steps"] for step in (5, 6, 7)] == [3, 4, 4]


@simulated(world=2)
def test_steps_skipped_by_a_grad_scaler_are_counted(rank, world):
    trained = Trained(rank=None)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale(loss_of(trained.model) * factor).backward()
        scaler.step(trained.optimizer)
        scaler.update()
        trained.optimizer.zero_grad()
        trained.log.step()
    assert [figures["train/skipped_steps"] for figures in trained.told.values()] == [0, 1, 1]


@simulated(world=2)
def test_the_norm_is_logged_only_for_steps_that_clip_unless_the_user_passes_one(rank, world):
    trained = Trained(rank=None)
    trained.step(clips=True)
    trained.step()
    other = nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    cs.clip_grad_norm_(other, 1.0)
    trained.step()
    trained.step(clips=True, grad_norm=7)
    assert ["train/grad_norm" in trained.told[step] for step in (1, 2, 3)] == [True, False, False]
    assert trained.told[4]["train/grad_norm"] == 7


@pytest.mark.parametrize("rank_that_writes", [0, 1, None])
@simulated(world=2)
def test_one_rank_or_all_ranks_write(rank, world, rank_that_writes):
    trained = Trained(rank=rank_that_writes)
    trained.step(clips=True)  # all ranks take part in the full norm
    assert bool(trained.told) == (rank_that_writes in (rank, None))


@pytest.mark.parametrize("over_ranks", ["max", "mean"])
@simulated(world=2)
def test_metrics_reduced_over_ranks_are_the_same_on_all_ranks(rank, world, over_ranks):
    trained = Trained(rank=None, over_ranks=over_ranks)
    for _ in range(2):
        trained.step(tokens=10 * (rank + 1), own=float(rank))
    own = trained.told[2]
    assert own["own"] == (1 if over_ranks == "max" else 0.5)
    assert own["log/ranks_differ"] == 0
    others = [None] * world
    torch.distributed.all_gather_object(others, own)
    assert others[0] == others[1] == own
    assert own["pool/peak_bytes"] == cs.stats(trained.model)["pool/peak_bytes"]
    assert own["step/tokens_per_second"] > 20 / own["step/seconds"] * 0.9


@simulated(world=2)
def test_ranks_with_different_metrics_do_not_hang(rank, world):
    trained = Trained(rank=None, over_ranks="max")
    trained.step(**({"mine": 3.0} if rank else {"other": 2.0, "another": 1.0}))
    figures = trained.told[1]
    assert figures["log/ranks_differ"] == 1
    assert (figures.get("mine"), figures.get("other"), figures.get("another")) == (
        (3, None, None) if rank else (None, 2, 1)
    )


def test_the_exposed_share_is_predicted_from_known_times_and_measured_while_watched():
    with fabric(4, latency_s=12e-6, bandwidth_Bps=64e6, clock="virtual") as net:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), Busy(20e-6)) for _ in range(3)))
        for each in (*model, model):
            cs.fully_shard(each, mesh=init_device_mesh("cpu", (4,)))
        model.set_prefetch_policy(cs.PrefetchPolicy.auto())
        told = {}
        log = cs.report.log_to(model, lambda figures, step: told.update({step: figures}))
        for step in range(6):
            if step == 5:
                cs.watch(model)
            net.reset()
            model(torch.ones(2, 16)).sum().backward()
            log.step()
        predicted = cs.make_plan(model).predicted()
        assert "plan/exposed_share" not in told[1]
        assert told[6]["plan/exposed_share"] == pytest.approx(predicted.exposed / predicted.seconds)
        assert told[6]["step/communication_share"] == pytest.approx(net.exposed_s / net.now())


# ---- loggers


@simulated(world=2)
def test_each_logger_is_called_in_the_way_of_its_package(rank, world):
    writer, run, logger = Writer(), Run(), Logger()
    trained = Trained([writer, run, logger], rank=None)
    loss = trained.step()
    (step, figures), (other_step, same) = run.logged[0], logger.logged[0]
    assert (step, other_step) == (1, 1)
    assert figures == same
    assert figures is not same
    assert writer.scalars == [(name, value, 1) for name, value in figures.items()]
    assert figures["train/loss"] == loss.item()


@pytest.mark.parametrize("kind", ["path", "text", "open"])
def test_a_file_has_one_line_of_json_per_step(tmp_path, kind):
    path = tmp_path / "runs" / "steps.jsonl"

    @simulated(world=2)
    def test(rank, world):
        opened = io.StringIO()
        logger = {"path": path, "text": str(path), "open": opened}[kind]
        with Trained(logger).log as log:
            log.step(loss=2.5, bad=float("nan"))
            log.step(loss=1.5)
        assert not opened.closed
        if kind == "open" and rank == 0:
            path.parent.mkdir()
            path.write_text(opened.getvalue())

    test()
    first, second = figures_in(path)
    assert (first["step"], first["train/loss"], first["bad"], second["train/loss"]) == (1, 2.5, None, 1.5)
    assert second["time"] >= first["time"] > 0


def test_a_new_log_appends_to_the_file_and_continues_the_step_numbers(tmp_path):
    @simulated(world=1)
    def test(rank, world):
        for done, loss in enumerate((1.0, 2.0)):
            with cs.report.log_to(cs.fully_shard(nn.Linear(2, 2)), tmp_path / "log", done=done) as log:
                log.step(loss=loss)

    test()
    assert [(line["step"], line["train/loss"]) for line in figures_in(tmp_path / "log")] == [(1, 1), (2, 2)]


def test_a_standard_logger_gets_a_message(caplog):
    @simulated(world=1)
    def test(rank, world):
        log = cs.report.log_to(cs.fully_shard(nn.Linear(2, 2)), logging.getLogger("training"))
        with caplog.at_level(logging.INFO):
            log.step(loss=0.25)

    test()
    assert caplog.messages == ["step 1: train/loss 0.25, train/skipped_steps 1"]


@simulated(world=1)
def test_a_failing_logger_warns_once_and_is_called_again(rank, world):
    model = cs.fully_shard(nn.Linear(2, 2))
    told = []

    def full(figures, step):
        told.append(step)
        if step < 3:
            raise OSError("the disk is full")

    log = cs.report.log_to(model, [full, lambda figures, step: told.append(-step)])
    with pytest.warns(UserWarning, match=r"logger .*full failed at step 1 with OSError: the disk is full. Training"):
        log.step()
    log.step()
    log.step()
    assert told == [1, -1, 2, -2, 3, -3]
    assert log.failures == 2


@simulated(world=1)
def test_invalid_arguments_of_log_to_raise_an_error(rank, world):
    model = cs.fully_shard(nn.Linear(2, 2))
    with pytest.raises(
        cs.errors.ShardConfigTypeError, match=r"logger: expected a path, .* add_scalar, log, write; got int"
    ):
        cs.report.log_to(model, 3)
    with pytest.raises(cs.errors.ShardConfigValueError, match="Linear contains no sharded module"):
        cs.report.log_to(nn.Linear(2, 2), print)
    with pytest.raises(cs.errors.ShardConfigValueError, match="every=0"):
        cs.report.log_to(model, print, every=0)
    with pytest.raises(cs.errors.ShardConfigValueError, match="done=-1"):
        cs.report.log_to(model, print, done=-1)
    with pytest.raises(cs.errors.ShardConfigValueError, match="over_ranks='min': expected None, 'max' or 'mean'"):
        cs.report.log_to(model, print, over_ranks="min")


# ---- memory and waits


@simulated(world=1)
def test_a_log_does_not_keep_its_model_alive(rank, world):
    model = cs.fully_shard(Stack(1), mesh=mesh_of(1))
    told = {}
    log = cs.report.log_to(model, lambda figures, step: told.update({step: figures}), every=2)
    loss = loss_of(model)
    loss.backward()
    cs.clip_grad_norm_(model.parameters(), 1.0)
    log.step(loss=loss)
    known = weakref.ref(model)
    del model, loss
    gc.collect()
    assert known() is None
    log.step(loss=1.0)
    assert "train/loss" in told[2]
    assert not any(name.startswith("pool/") for name in told[2])


def test_metrics_are_written_when_the_accelerator_has_computed_them(monkeypatch):
    class Slow(loggers._Arriving):
        come = False

        @property
        def has_come(self):
            return Slow.come

    monkeypatch.setattr(loggers, "_Arriving", Slow)

    @simulated(world=1)
    def test(rank, world):
        told = []
        log = cs.report.log_to(cs.fully_shard(nn.Linear(2, 2)), lambda figures, step: told.append(step))
        log.step()
        log.step()
        assert told == []
        Slow.come = True
        log.step()
        assert told == [1, 2, 3]
        Slow.come = False
        log.step()
        log.close()
        assert told == [1, 2, 3, 4]

    test()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_metrics_on_a_gpu_are_written_later_without_a_host_sync():
    def body(world):
        model = cs.fully_shard(nn.Linear(8, 8, device="cuda"), mesh=world.mesh)
        told = {}
        log = cs.report.log_to(model, lambda figures, step: told.update({step: figures}))
        loss = model(torch.ones(2, 8, device="cuda")).mean()
        torch.cuda.set_sync_debug_mode("error")
        try:
            log.step(loss=loss, tokens=torch.tensor(3, device="cuda"))
            log.step(loss=loss)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        log.close()
        assert told[1]["train/loss"] == told[2]["train/loss"] == loss.item()

    spmd(1, device="cuda")(body)
