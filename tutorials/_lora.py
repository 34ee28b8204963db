"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) beside linear layers that stay as they are."""

from collections.abc import Iterable
from types import ModuleType

from torch import nn

from composable_shard.planner.decoder import LowRank


def peft_or_none() -> ModuleType | None:
    """PEFT, if it is installed."""
    try:
        import peft
    except ImportError:
        return None
    return peft


def with_adapters(model: nn.Module, blocks: Iterable[nn.Module], rank: int) -> nn.Module:
    """The model with adapters on the linear layers of its blocks, which alone train; call it before it is sharded.

    A model of Transformers gets them of PEFT, if that is installed.
    """
    peft = peft_or_none()
    if peft is not None and hasattr(model, "add_adapter"):  # one of Transformers
        settings = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", task_type="CAUSAL_LM")
        return peft.get_peft_model(model, settings, autocast_adapter_dtype=False)
    model.requires_grad_(False)
    parents = [module for block in blocks for module in block.modules()]
    linear = [(parent, name, child) for parent in parents for name, child in parent.named_children()]
    linear = [each for each in linear if isinstance(each[2], nn.Linear)]
    if not linear:
        raise SystemExit(
            "--lora: the blocks of this model hold no nn.Linear; PEFT (pip install peft) knows other kinds"
        )
    for parent, name, child in linear:
        parent.register_module(name, LowRank(child, rank))
    return model


def reset_adapter(module: nn.Module) -> None:
    """Let an adapter begin as one that changes nothing."""
    if isinstance(module, LowRank):
        module.down.reset_parameters()
        nn.init.zeros_(module.up.weight)
    elif hasattr(module, "reset_lora_parameters"):  # of PEFT
        for name in module.lora_A:
            module.reset_lora_parameters(name, True)


def names_with_adapters(model: nn.Module) -> dict[str, str]:
    """By the name that a parameter had before its model got adapters, the one that it has; none of the adapters."""
    kept = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    parts = [name.removeprefix("base_model.model.").split(".") for name in kept]
    before = (".".join(part for part in each if part not in ("base", "base_layer")) for each in parts)
    return dict(zip(before, kept, strict=True))


def trained_parameters(model: nn.Module) -> nn.Module:
    """What a checkpoint needs of a model in which few parameters train: a module that holds those alone.

    Its parameters are the model's own, so it is made when the model is sharded and has its memory.
    """
    trained = {name.replace(".", "/"): p for name, p in model.named_parameters() if p.requires_grad}
    return nn.ParameterDict(trained)
