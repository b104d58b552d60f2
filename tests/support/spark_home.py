"""A home for Spark whose Python processes start fast."""

from __future__ import annotations

from pathlib import Path


def spark_home(directory: Path) -> Path:
    """Make `directory` a SPARK_HOME of links to the installed Spark, and return it.

    It has no `python`. Spark puts the archive in there first on the path of its Python processes,
    which compile whatever they import from it at every start. Without it they import the package
    that is installed, whose byte code is on disk, and start in a third of the time. `work` is not
    linked either: what executors write beside Spark goes to this directory.
    """
    import pyspark

    directory.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        if entry.name not in ("python", "work"):
            (directory / entry.name).symlink_to(entry)
    return directory
