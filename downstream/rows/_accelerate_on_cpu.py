"""FSDP2 of Accelerate, and of Transformers' Trainer, on a CPU.

Accelerate looks for an accelerator before it looks at its FSDP plugin, and without one it ends with DDP. Here it is
told that its processes are of the kind that they are on accelerators. All that follows from that is its own code.
"""

from __future__ import annotations

import os

import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType


def fsdp2_on_cpu() -> None:
    """What `accelerate launch` and a device do: a process group, the device, and a distributed type that may shard."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    PartialState._prepare_backend = lambda self, *_: ("gloo", DistributedType.MULTI_GPU)
