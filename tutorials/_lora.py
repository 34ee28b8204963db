"""Add low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) to frozen linear layers."""

from collections.abc import Iterable
from types import ModuleType

from torch import nn

from composable_shard.planner.decoder import LowRank


def peft_or_none() -> ModuleType | None:
    """Return the module `peft` if it is installed."""
    try:
        import peft
    except ImportError:
        return None
    return peft


def with_adapters(model: nn.Module, blocks: Iterable[nn.Module], rank: int) -> nn.Module:
    """Freeze the model and add trainable adapters to the linear layers of its blocks. Call this before sharding.

    Models of Transformers get adapters of PEFT if it is installed.
    """
    peft = peft_or_none()
    if peft is not None and hasattr(model, "add_adapter"):  # a model of Transformers
        settings = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", task_type="CAUSAL_LM")
        return peft.get_peft_model(model, settings, autocast_adapter_dtype=False)
    model.requires_grad_(False)
    parents = [module for block in blocks for module in block.modules()]
    linear = [(parent, name, child) for parent in parents for name, child in parent.named_children()]
    linear = [each for each in linear if isinstance(each[2], nn.Linear)]
    if not linear:
        raise SystemExit(
            "--lora: the blocks of this model have no nn.Linear; PEFT (pip install peft) supports other layers"
        )
    for parent, name, child in linear:
        parent.register_module(name, LowRank(child, rank))
    return model


def reset_adapter(module: nn.Module) -> None:
    """Initialize an adapter so that it does not change the output of its layer."""
    if isinstance(module, LowRank):
        module.down.reset_parameters()
        nn.init.zeros_(module.up.weight)
    elif hasattr(module, "reset_lora_parameters"):  # of PEFT
        for name in module.lora_A:
            module.reset_lora_parameters(name, True)


def names_with_adapters(model: nn.Module) -> dict[str, str]:
    """Map the names of the base model's parameters to their names in the model with adapters."""
    kept = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    parts = [name.removeprefix("base_model.model.").split(".") for name in kept]
    before = (".".join(part for part in each if part not in ("base", "base_layer")) for each in parts)
    return dict(zip(before, kept, strict=True))


def trained_parameters(model: nn.Module) -> nn.Module:
    """Return a module with only the trainable parameters of the model, for checkpoints.

    It shares its parameters with the model. Create it after the model is sharded and materialized.
    """
    trained = {name.replace(".", "/"): p for name, p in model.named_parameters() if p.requires_grad}
    return nn.ParameterDict(trained)
