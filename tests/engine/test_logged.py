"""The log of the engine's actions, with the names of groups."""

from __future__ import annotations

import logging

import torch
from torch import nn

from _pool import simulated
from composable_shard import fully_shard, last_record


def small():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


class Lines(logging.Handler):
    """Collects the messages of a logger."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@simulated(world=1)
def test_actions_are_logged_in_the_form_of_records_only_while_the_level_is_debug(rank, world):
    model, logger, heard = small(), logging.getLogger("composable_shard.engine"), Lines()
    logger.addHandler(heard)
    try:
        model(torch.ones(2, 4)).sum().backward()
        assert heard.lines == []
        logger.setLevel(logging.DEBUG)
        model(torch.ones(2, 4)).sum().backward()
        logged = list(heard.lines)
        assert logged == str(last_record(model)).splitlines()
        assert "UNSHARD 1" in logged
        logger.setLevel(logging.WARNING)
        model(torch.ones(2, 4)).sum().backward()
        assert heard.lines == logged
    finally:
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(heard)
