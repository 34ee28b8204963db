"""`compile`, and what it stores between runs."""

from .compiled import backend as backend  # named in the entry points of the package
