"""``python -m composable_shard``: see `composable_shard.cli`."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
