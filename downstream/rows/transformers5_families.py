"""Rows for the model families of Transformers 5, trained with one parameter group per block."""

from __future__ import annotations

import _families

from _rows import Rows

rows = Rows("Transformers 5: models", environment="transformers5", versions=("transformers",))

_families.add(rows)
