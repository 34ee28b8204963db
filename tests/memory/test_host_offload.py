"""Offload to host memory: its policies, and steps that copy to the host and back.

Without an accelerator, the steps are tested with copies within CPU memory and with simulated lanes.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim import SGD, AdamW

import composable_shard as cs
from _offloading import assert_same, decoder, train
from _pool import distributed, more, simulated
from composable_shard._comm.lanes import Job, Lane, cpu_lanes
from composable_shard._memory.offload import take_over
from composable_shard._memory.state_on_host import StateOnHost
from composable_shard._policies import keeps_shards_on_host

needs_accelerator = pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator to offload from")


def test_invalid_host_policies_raise_an_error():
    with pytest.raises(cs.errors.ShardConfigTypeError, match="pin_memory=1: expected True or False"):
        cs.HostOffloadPolicy(pin_memory=1)


def test_keeps_shards_on_host_for_each_policy(tmp_path):
    assert all(map(keeps_shards_on_host, [cs.CPUOffloadPolicy(), cs.DiskOffloadPolicy(tmp_path, 1)]))
    assert not any(map(keeps_shards_on_host, [cs.OffloadPolicy(), cs.HostOffloadPolicy(), None]))


@distributed(world=2)
def test_host_policies_change_nothing_without_an_accelerator(rank, world):
    sides = []
    for each in (None, cs.HostOffloadPolicy()):
        model = decoder(each)
        optimizer = AdamW(model.parameters())
        if each is not None:
            assert type(cs.optim.offload_optimizer(optimizer, each)) is AdamW
        train(model, optimizer, range(2), rank)
        sides.append((model, optimizer))
    assert_same(*sides)


class Simulated(Lane):
    """A lane that behaves like a stream: it queues all work immediately and records it."""

    streams = True
    log: list[str] = []  # noqa: RUF012 - emptied by the test that reads it
    number = 0

    def __init__(self):
        Simulated.number += 1
        self.name = "coming" if Simulated.number % 2 else "going"

    def start(self, steps, after=(), held=None, when_done=None):
        Simulated.log.append(self.name)
        return Job(steps, held, True, when_done)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (AdamW, {"fused": True}),
        more(AdamW, {"foreach": True, "amsgrad": True}),
        (SGD, {"lr": 0.1, "momentum": 0.9}),
    ],
)
@simulated(world=2)
def test_steps_on_the_host_match_the_fused_optimizer(rank, world, make, options):
    sides = []
    for offload in (False, True):
        model = decoder()
        given = {**options, "fused": None} if offload and "fused" in options else options
        optimizer = make(model.parameters(), **given)
        if offload:
            take_over(optimizer, StateOnHost(pins=False, fused="fused" in options), True)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step in range(3):
            train(model, optimizer, [step], rank)
            scheduler.step()
            content = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, [3], rank)
        optimizer.load_state_dict(content)
        train(model, optimizer, [4], rank)
        sides.append((model, optimizer))
        assert [*optimizer.state] == [*model.parameters()]
    assert_same(*sides)


def test_copies_of_later_parts_are_queued_before_a_part_is_stepped(monkeypatch):
    monkeypatch.setattr("composable_shard._memory.state_on_host._PART", 6000)
    sides = []
    for offload in (False, True):
        model = decoder(shard=False)
        optimizer = AdamW(model.parameters(), fused=True)
        if offload:
            take_over(optimizer, StateOnHost(pins=False, fused=True), True)
            step = optimizer._keeper._step_part
            monkeypatch.setattr(
                optimizer._keeper, "_step_part", lambda *args, step=step: (Simulated.log.append("step"), step(*args))[1]
            )
        with cpu_lanes(Simulated):
            for number in range(2):
                Simulated.log.clear()
                train(model, optimizer, [number])
        sides.append((model, optimizer))
    assert_same(*sides)
    log = Simulated.log
    parts = log.count("step")
    assert parts > 4
    assert log.count("coming") == log.count("going") == parts
    assert log[:6] == ["coming", "coming", "coming", "step", "going", "coming"]


@needs_accelerator
@pytest.mark.parametrize("policy", [cs.CPUOffloadPolicy(), cs.HostOffloadPolicy()], ids=["all", "optimizer"])
@distributed(world=1)
def test_on_an_accelerator_state_is_on_the_host(rank, world, policy):
    device = torch.accelerator.current_accelerator()
    model = decoder(policy, shard=False)
    on_host = keeps_shards_on_host(policy)
    if not on_host:
        model = model.to(device)
    for module in (*model.blocks, model):
        cs.fully_shard(module, offload_policy=policy)
    optimizer = AdamW(model.parameters())
    if not on_host:
        cs.optim.offload_optimizer(optimizer)
    for _ in range(2):
        model(torch.zeros(1, 8, dtype=torch.long, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for param in model.parameters():
        assert param.to_local().device.type == ("cpu" if on_host else device.type)
        assert all(value.device.type == "cpu" for value in optimizer.state[param].values())
