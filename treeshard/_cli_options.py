"""What several commands share: renaming, progress bars, and where JAX runs."""

import re
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec

import jax

from treeshard._errors import FormatError
from treeshard._tensor_trees import tensor_names


def off_accelerators() -> None:
    """Keeps JAX on the CPU, which is enough for files, unless the user chose a platform."""
    if not jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]  (JAX defines it at run time)
        jax.config.update("jax_platforms", "cpu")


def wants_bar() -> bool:
    """Whether to show a progress bar: on a terminal, if `tqdm` is installed."""
    return sys.stderr.isatty() and find_spec("tqdm") is not None


def pattern(text: str, option: str) -> re.Pattern[str]:
    """Reads a regular expression."""
    try:
        return re.compile(text)
    except re.error as error:
        raise FormatError(f"{option} {text!r}: the pattern does not compile: {error}.") from None


def renamed(paths: Iterable[str], rules: Sequence[str], where: str) -> dict[str, str]:
    """The new names of leaves, by their paths.

    Args:
        paths: The paths.
        rules: Strings `REGEX=>NEW`, applied in order.
        where: The name of the command, for messages.

    Raises:
        FormatError: If a rule is malformed.
        CheckpointError: If leaves would share a name.
    """
    pairs = [_read_rule(rule) for rule in rules]

    def rename(path: str) -> str:
        for old, new in pairs:
            try:
                path = old.sub(new, path)
            except (re.error, IndexError) as error:
                raise FormatError(f"--rename: {new!r} is not a replacement: {error}.") from None
        return path

    tree = dict.fromkeys(sorted(paths), jax.ShapeDtypeStruct((), "bool"))
    return dict(zip(tree, tensor_names(tree, rename, where).values(), strict=True))


def _read_rule(rule: str) -> tuple[re.Pattern[str], str]:
    old, arrow, new = rule.partition("=>")
    if not arrow:
        raise FormatError(f"--rename {rule!r} has no '=>'. Write it as 'REGEX=>NEW', '/=>.'.")
    return pattern(old, "--rename"), new
