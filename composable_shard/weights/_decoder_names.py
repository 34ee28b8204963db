"""Names of the tensors of decoder models on the Hugging Face hub."""

from __future__ import annotations

import re
from typing import NamedTuple

_LAYER = r"(?:(?:language_)?model\.)*layers\.\d+\."
_END = r"\.(?P<end>weight|bias)"
EMBEDDING = re.compile(r"(?:(?:language_)?model\.)*embed_tokens\.weight")
HEAD = re.compile(r"(?:language_model\.)?lm_head\.weight")


class Place(NamedTuple):
    """Where the name of a tensor puts it.

    Attributes:
        family: how tensors of such names are split: a rule, or the name of a method that combines several.
        base: name of the module that contains it.
        role: which of the module's tensors it is.
        end: "weight" or "bias"; empty for experts.
        expert: number of the expert; -1 if there is none.
    """

    family: str
    base: str = ""
    role: str = ""
    end: str = ""
    expert: int = -1

    @property
    def ndim(self) -> int | None:
        """Number of dims of such a tensor; None if there are several of such names."""
        if self.family == "experts":
            return 3 if self.expert < 0 else 2
        if not self.end:
            return None
        return 2 if self.end == "weight" and self.family != "head_norm" else 1


_FAMILIES = [
    (family, re.compile(pattern))
    for family, pattern in {
        "attention": rf"(?P<base>{_LAYER}self_attn)\.(?P<role>(?:q|k|v|qkv)_proj){_END}",
        "feed_forward": rf"(?P<base>{_LAYER}mlp(?:\.shared_experts?)?)\.(?P<role>(?:gate|up|gate_up)_proj){_END}",
        "experts": rf"(?P<base>{_LAYER}(?:mlp|block_sparse_moe)\.experts)\."
        r"(?:(?P<expert>\d+)\.(?P<role>(?:gate|up|down)_proj|w[123])\.weight|(?P<stack>(?:gate_up|down)_proj))",
        "output": rf"(?P<base>{_LAYER}self_attn)\.(?P<role>o_proj){_END}",
        "rows": rf"(?P<base>{_LAYER}mlp(?:\.shared_experts?)?)\.(?P<role>down_proj){_END}",
        "vocabulary": rf"(?:(?:(?:language_)?model\.)*embed_tokens|(?:language_model\.)?lm_head){_END}",
        "head_norm": rf"(?P<base>{_LAYER}self_attn)\.(?P<role>[qk]_norm){_END}",
        "whole": rf"{_LAYER}(?:(?:input|post_attention|pre_feedforward|post_feedforward)_layernorm\.(?:weight|bias)|"
        r"(?:mlp|block_sparse_moe)\.gate\.weight|mlp\.gate\.e_score_correction_bias|mlp\.shared_expert_gate\.weight)|"
        r"(?:(?:language_)?model\.)*norm\.(?:weight|bias)",
    }.items()
]
QUANTIZED = re.compile(
    r".*(?:_scale|_scale_inv|_zero_point|_packed|_shape|\.qweight|\.qzeros|\.scales|\.g_idx|\.SCB|\.absmax|\.quant_map|"
    r"\.nested_.*|\.quant_state.*)"
)
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def find_place(name: str) -> Place | None:
    """Find the place of a hub name; None if it is unknown."""
    for family, pattern in _FAMILIES:
        if match := pattern.fullmatch(name):
            groups = match.groupdict()
            role = groups.get("stack") or groups.get("role") or ""
            expert = int(groups.get("expert") or -1)
            return Place(family, groups.get("base") or "", _MIXTRAL.get(role, role), groups.get("end") or "", expert)
    return None


def starred(name: str) -> str:
    """A name with stars for numbers, so that a problem of all layers is listed once."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
