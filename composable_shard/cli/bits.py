"""Formats of communication and of linear layers, as options of a command."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .._policies import CommPolicy

_FORMS = ("bf16", "fp8", "int8")  # those of `CommPolicy`, without loading torch


def add_bits(parser: Any) -> None:
    """Add the options to a parser, or to a group of its arguments."""
    add = parser.add_argument
    add("--gather", choices=_FORMS, help="format in which weights are sent (default: their dtype)")
    add("--reduce", choices=_FORMS, help="format in which gradients are sent between shards")
    add(
        "--between-replicas",
        choices=_FORMS,
        help="format in which gradients are sent over the outer axis (hsdp, hfsdp)",
    )
    add("--refresh", choices=_FORMS, help="format in which weights are sent over the outer axis (hfsdp)")
    add(
        "--linear-format",
        metavar="NAME",
        help="format of linear layers in blocks: float8_tensorwise (also gathers in float8), float8_rowwise or mxfp8",
    )
    parser.add_argument(
        "--block", type=int, default=256, metavar="N", help="elements that share a scale (default: 256)"
    )


def bits_of(parsed: argparse.Namespace) -> CommPolicy:
    """Make a policy from the options.

    Raises:
        ShardConfigValueError: the options are not a valid policy.
    """
    from .._policies import CommPolicy

    return CommPolicy(parsed.gather, parsed.reduce, parsed.between_replicas, parsed.block, parsed.refresh)
