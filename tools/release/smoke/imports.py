"""What an installed composable_shard is: where it lies, its version, its marker of types, and that all of it imports.

    python imports.py 0.1.0.dev0

It runs in an environment that has been made for it. A module may ask for an extra that is not installed, and for
nothing else that is missing.
"""

import importlib
import pkgutil
import sys
from importlib.metadata import version
from pathlib import Path

EXTRAS = {"matplotlib", "pytest", "rich", "safetensors", "xxhash"}


def import_everything() -> tuple[int, int]:
    """Import all modules of the package; gives how many there are, and how many lack an extra."""
    import composable_shard

    names = [each.name for each in pkgutil.walk_packages(composable_shard.__path__, "composable_shard.")]
    lacking = 0
    for name in (each for each in names if not each.endswith(".__main__")):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in EXTRAS:
                raise
            lacking += 1
    return len(names), lacking


def main(expected: str) -> int:
    import composable_shard

    folder = Path(composable_shard.__file__).parent
    assert folder.is_relative_to(sys.prefix), f"imported from {folder}, which is not in {sys.prefix}"
    assert composable_shard.__version__ == version("composable-shard") == expected, composable_shard.__version__
    assert (folder / "py.typed").is_file(), "the marker of types is missing"
    count, lacking = import_everything()
    print(f"{count} modules of {composable_shard.__version__}, {lacking} of them for extras")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
