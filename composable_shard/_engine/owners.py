"""Which group a bucket belongs to."""

from __future__ import annotations

from collections.abc import Sequence

from .._errors import ShardConfigStateError
from .._group.bucket import Bucket
from .._group.group import ParamGroup


class Owners:
    """The groups of one engine, by their buckets. Conversions make buckets anew."""

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self._groups = groups
        self._by_bucket: dict[Bucket, ParamGroup] = {}

    def forget(self) -> None:
        """Hold no bucket: groups make others."""
        self._by_bucket.clear()

    def of(self, bucket: Bucket) -> ParamGroup:
        """Whose bucket it is.

        Raises:
            ShardConfigStateError: nobody's any more.
        """
        group = self._by_bucket.get(bucket)
        if group is None:
            self._by_bucket = {b: g for g in self._groups for b in g.buckets}
            group = self._by_bucket.get(bucket)
        if group is None:
            raise ShardConfigStateError(
                f"parameters {', '.join(bucket.fqns)}: were converted or replaced between forward and backward; "
                "run backward first, or run forward again"
            )
        return group
