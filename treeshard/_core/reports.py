"""The one door from the core to the reports on programs, which load when one is asked for.

The core decides, places, trains and saves without them.
"""

import os
import sys
from importlib import import_module
from typing import Any


def report(module: str) -> Any:
    """A module of the reports, such as `"programs._lock"`."""
    return import_module(f"treeshard.{module}")


def reports_loaded() -> bool:
    """Whether this process has loaded them, or `TREESHARD_CHECK=1` says to check first steps."""
    is_loaded = sys.modules.get("treeshard.communication") is not None
    return is_loaded or os.environ.get("TREESHARD_CHECK") == "1"
