"""Check an installed composable_shard: location, version, py.typed, and that all modules import.

    python imports.py 0.1.0.dev0

Run it in a new environment. The import of a module may fail only if it needs an extra that is not installed.
"""

import importlib
import pkgutil
import sys
from importlib.metadata import version
from pathlib import Path

EXTRAS = {"matplotlib", "pytest", "rich", "safetensors", "xxhash"}


def import_everything() -> tuple[int, int]:
    """Import all modules of the package. Return their number, and the number of modules that need a missing extra."""
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
    assert (folder / "py.typed").is_file(), "py.typed is missing"
    count, lacking = import_everything()
    print(f"version {composable_shard.__version__}: {count} modules, {lacking} of them need missing extras")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
