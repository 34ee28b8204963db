"""In how many bits weights and gradients travel, as options of a command."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .._policies import CommPolicy

_FORMS = ("bf16", "fp8", "int8")  # those of `CommPolicy`, without loading torch


def add_bits(parser: Any) -> None:
    """Add the options to a parser, or to a group of its arguments."""
    add = parser.add_argument
    add("--gather", choices=_FORMS, help="what weights travel as (default: as they are)")
    add("--reduce", choices=_FORMS, help="what gradients travel as between shards")
    add("--between-replicas", choices=_FORMS, help="what gradients travel as between replicas (hsdp)")
    parser.add_argument(
        "--block", type=int, default=256, metavar="N", help="elements that share a scale (default: 256)"
    )
    add("--error-feedback", action="store_true", help="add what rounding leaves to the next gradients")


def bits_of(parsed: argparse.Namespace) -> CommPolicy:
    """The policy that the options make.

    Raises:
        ShardConfigValueError: it cannot be.
    """
    from .._policies import CommPolicy

    how = {"block": parsed.block, "error_feedback": parsed.error_feedback}
    return CommPolicy(parsed.gather, parsed.reduce, parsed.between_replicas, **how)
