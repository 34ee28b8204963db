"""An advice as text: a table, JSON, and a script that trains with a strategy."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import Any

from .._plan.text import table
from .._policies import AS_IT_IS, CommPolicy
from .advise import Advice, Estimate
from .stepping import ADAMW, IN_BACKWARD, OWNED
from .strategies import DISK_MEMORY, HFSDP, Strategy

HEAD = (
    "strategy", "fits", "memory", "params", "optimizer", "grads", "activ.", "unsharded", "step", "tokens/s", "exposed",
)  # fmt: skip
_POLICIES = {
    "float32": "",
    "bfloat16-mixed": "cs.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
    "float16-mixed": "cs.MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)",
    "bfloat16": "",
}


def rows(advice: Advice, most: int | None = None) -> list[list[str]]:
    """The cells of a table: the recommended strategy first, then the others in order. Memory is in GiB."""
    return [_row(each) for each in shown(advice, most)]


def shown(advice: Advice, most: int | None) -> list[Estimate]:
    """The estimates in the rows of `rows`, in the same order."""
    first = [advice.recommended] if advice.recommended is not None else []
    listed = first + [each for each in advice.estimates if each is not advice.recommended]
    return listed[:most]


def _row(estimate: Estimate) -> list[str]:
    most = estimate.memory.most
    kinds = (
        most.parameters + most.copies,
        most.optimizer,
        most.gradients,
        most.activations,
        most.unsharded + most.communication,
    )
    return [
        str(estimate.strategy),
        _fits(estimate),
        _gib(estimate.needed),
        *map(_gib, kinds),
        f"{estimate.time.seconds:.3g} s",
        f"{estimate.tokens_per_second:,.0f}",
        f"{estimate.exposed_share:.1%}",
    ]


def _fits(estimate: Estimate) -> str:
    if estimate.fits:
        return "yes"
    return f"no, {_gib(estimate.short)} short" if estimate.short else f"no, host {_gib(estimate.host_short)} short"


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f}"


def title(advice: Advice) -> str:
    """The model, its settings, and the devices."""
    devices = "1 device" if advice.devices == 1 else f"{advice.devices} devices"
    memory = advice.machine.memory / 2**30
    bits = "" if advice.comm_policy == AS_IT_IS else f" ({advice.comm_policy})"
    bits += "" if advice.linear_format is None else f", linear layers in {advice.linear_format}"
    bits += ", compiled blocks" if advice.compile_blocks else ""
    return (
        f"{advice.model}, {advice.precision}{bits}, {advice.tokens:,} tokens per step on {devices} "
        f"({advice.machine.name}, {memory:.1f} GiB each)"
    )


NOTE = "memory in GiB per device, maximum of each category; exposed: share of a step that is exposed communication"


def text(advice: Advice, most: int | None = 12) -> str:
    """The advice as plain text."""
    lines = table([HEAD, *rows(advice, most)], left=(0, 1))
    reason = textwrap.fill(advice.reason, 110)
    return "\n".join([title(advice), "", *lines, "", NOTE, "", reason])


def as_json(advice: Advice) -> dict[str, Any]:
    """The advice as JSON types."""

    def estimate(each: Estimate) -> dict[str, Any]:
        return {
            "strategy": str(each.strategy),
            "fits": each.fits,
            "needed_bytes": each.needed,
            "reserved_bytes": each.memory.reserved,
            "exposed_share": each.exposed_share,
            **asdict(each),
        }

    return {
        "model": advice.model,
        "machine": asdict(advice.machine),
        "devices": advice.devices,
        "precision": advice.precision,
        "linear_format": advice.linear_format,
        "compile_blocks": advice.compile_blocks,
        "comm_policy": str(advice.comm_policy),
        "tokens": advice.tokens,
        "recommended": None if advice.recommended is None else estimate(advice.recommended),
        "reason": advice.reason,
        "estimates": [estimate(each) for each in advice.estimates],
    }


def script(advice: Advice, estimate: Estimate) -> str:
    """Python lines that shard `model` by a strategy. The script that contains them must make `model` first."""
    strategy = estimate.strategy
    lines = ["import torch", "import composable_shard as cs", "", *_conversion(advice.linear_format)]
    if strategy.checkpointing != "none":
        lines += [f"# {strategy.checkpointing} activation checkpointing of each block, before it is sharded"]
        lines += ["from composable_shard.planner import checkpoint_modules, repeated_blocks", ""]
        lines += [f'checkpoint_modules(repeated_blocks(model), "{strategy.checkpointing}")']
    if advice.compile_blocks:
        lines += ["", _IMPORT_BLOCKS, "", "for block in repeated_blocks(model):", "    block.compile()"]
    lines += _sharding(strategy, _POLICIES[advice.precision], advice.comm_policy)
    lines += _OPTIMIZERS[advice.optimizer]
    lines += ["cs.optim.offload_optimizer(optimizer)"] if strategy.disk or strategy.state else []
    lines += _AFTER_STEP if advice.linear_format == "float8_tensorwise" else []
    lines += [""]
    return "\n".join(lines)


_CONVERTED = (
    "",
    "def converts(layer, name):",
    "    if not isinstance(layer, torch.nn.Linear) or not layer.weight.requires_grad:",
    "        return False",
    "    return layer.in_features % 16 == layer.out_features % 16 == 0",
    "",
    "for block in repeated_blocks(model):",
)
_FLOAT8 = "from torchao.float8 import Float8LinearConfig, convert_to_float8_training"
_CONVERT = "    convert_to_float8_training(block, module_filter_fn=converts, config=config)"
_CONVERSIONS = {
    "float8_tensorwise": [
        _FLOAT8, "", "config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)", *_CONVERTED, _CONVERT,
    ],
    "float8_rowwise": [
        _FLOAT8, "", 'config = Float8LinearConfig.from_recipe_name("rowwise")', *_CONVERTED, _CONVERT,
    ],
    "mxfp8": [
        "from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig",
        "from torchao.quantization import quantize_",
        "",
        *_CONVERTED,
        "    quantize_(block, MXFP8TrainingOpConfig(), filter_fn=converts)",
    ],
}  # fmt: skip
_IMPORT_BLOCKS = "from composable_shard.planner import repeated_blocks"
_AFTER_STEP = [
    "",
    "# after each optimizer step:",
    "# from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp",
    "# precompute_float8_dynamic_scale_for_fsdp(model)",
]


def _conversion(linear_format: str | None) -> list[str]:
    """Python lines that convert the linear layers of blocks by torchao."""
    if linear_format is None:
        return []
    return [_IMPORT_BLOCKS, *_CONVERSIONS[linear_format], ""]


_ADAMW = "torch.optim.AdamW({params}, lr=3e-4, fused=True)"
_OPTIMIZERS = {
    ADAMW: [f"optimizer = {_ADAMW.format(params='model.parameters()')}"],
    IN_BACKWARD: [f"optimizer = cs.optim.in_backward(model, lambda params: {_ADAMW.format(params='params')})"],
    OWNED: [
        "from composable_shard.planner import repeated_blocks",
        "",
        "blocks = {p for block in repeated_blocks(model) for p in block.parameters()}",
        "matrices = [(n, p) for n, p in model.named_parameters() if p.ndim in (2, 3) and p in blocks]",
        "muon = cs.optim.owned(torch.optim.Muon, matrices, lr=0.02)",
        "others = {*model.parameters()} - {p for _, p in matrices}",
        f"adamw = {_ADAMW.format(params='[p for p in model.parameters() if p in others]')}",
    ],
}  # fmt: skip


def _sharding(strategy: Strategy, policy: str, comm: CommPolicy) -> list[str]:
    arguments = [f'strategy="{strategy.name}"']
    arguments += [f"replicas={strategy.layout.replicas}"] if strategy.name in ("hsdp", HFSDP) else []
    arguments += [f"reshard_after_forward={strategy.few}"] if strategy.few else []
    before: list[str] = []
    if strategy.layout.tensor > 1:
        dims = strategy.layout.replicas, strategy.layout.shard, strategy.layout.tensor
        before = [
            "from torch.distributed.device_mesh import init_device_mesh",
            "",
            f'mesh = init_device_mesh("cuda", {dims}, mesh_dim_names=("replicate", "shard", "tensor"))',
            '# call parallelize_module(block, mesh["tensor"], ...) for each block here',
        ]
        arguments += ['mesh=mesh["replicate", "shard"]']
    arguments += [f"mp_policy={policy}"] if policy else []
    arguments += [f"comm_policy=cs.{comm!r}"] if comm != AS_IT_IS else []
    arguments += [f"offload_policy={_offload(strategy)}"] if strategy.offloads else []
    call = ["cs.shard_auto(", "    model,", *(f"    {each}," for each in arguments), ")"]
    return [*before, *call]


def _offload(strategy: Strategy) -> str:
    if strategy.state:
        return "cs.HostOffloadPolicy()"
    if strategy.disk:  # a directory on a fast disk of each node
        return f'cs.DiskOffloadPolicy("offload", memory=1 << {DISK_MEMORY.bit_length() - 1})'
    return "cs.CPUOffloadPolicy()"
