"""One rank of `figures.py`, part `losses`: train the demo (`tutorials/01_train_gpt.py`) and return all losses."""

import math
import os
from pathlib import Path
from typing import Any

import torch

import _engines
from _models import GPTBlock, tutorial
from _step_worker import run

# The demo's own code shards the model. Models are compiled as in `_engines.build`.
STRATEGIES = {"single": "none", "ours": "zero3", "fsdp2": "fsdp2"}


def measure(settings: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Return the mean loss of all ranks in each step. The data do not depend on the number of ranks."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(os.environ["BENCH_FOLDER"], "compiled"))
    demo = tutorial("01_train_gpt")
    name = settings["engine"]
    plain = name.removesuffix(_engines.PLACED).removesuffix(_engines.BLOCKS)
    options = demo.Options(
        strategy=STRATEGIES[plain],
        size=settings["size"],
        steps=settings["steps"],
        batch=settings["windows"] // world,
        precision="float32",
    )
    device = torch.device("cpu")
    model = demo.build_gpt(options.size, options.seed)
    if name.endswith(_engines.BLOCKS):
        _engines.compile_blocks(model, GPTBlock, settings["backend"])
    demo.shard(model, options, device)
    optimizer = demo.make_optimizer(model, options)
    if name.endswith(_engines.PLACED):
        model = _engines.placed(model, settings["backend"])
    position = demo.begin(options)
    position.next_evaluation = math.inf  # no evaluation, which would compile the model again
    history = demo.train(model, optimizer, demo.load_corpus(), options, device, position)
    return {"losses": [moment.loss for moment in history], "seconds": history[-1].seconds}


if __name__ == "__main__":
    run(measure)
