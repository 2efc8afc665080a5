"""The one door from the core to the reports on programs, which load when one is asked for.

The core decides, places, trains and saves without them.
"""

from importlib import import_module
from typing import Any


def report(module: str) -> Any:
    """A module of the reports, such as `"programs._lock"`."""
    return import_module(f"treeshard.{module}")
