"""The deprecations that tests tolerate; every other warning is an error, on every version.

Each has a reason and a day. After it a test fails: look whether the reason still holds.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from typing import NamedTuple


class Tolerated(NamedTuple):
    """A deprecation, by the start of its message (a regex)."""

    message: str
    reason: str
    until: date


TOLERATED = {
    "with mesh": Tolerated(
        "`with mesh:` context manager",
        "treeshard reads the mesh of `with mesh:` as long as the newest JAX has it.",
        date(2027, 6, 30),
    ),
    "optax": Tolerated(
        "",  # each has its own
        "optax still exports its deprecated optimizers, and their states must get specs.",
        date(2027, 6, 30),
    ),
    "haliax": Tolerated(
        r"jax\.(core|experimental|interpreters)\.\S+ is deprecated",
        "haliax uses old names of JAX, such as that of shard_map.",
        date(2027, 6, 30),
    ),
    "fork": Tolerated(
        ".*use of fork",
        "Tests fork processes on purpose, before JAX has threads.",
        date(2027, 12, 31),
    ),
}


@contextmanager
def tolerated(name: str) -> Iterator[None]:
    """Ignores one deprecation of the table inside the block."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", TOLERATED[name].message, DeprecationWarning)
        yield
