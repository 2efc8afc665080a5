"""What the compiler's partitioner complains of while it compiles.

It does so on the C++ side's standard error, which Python's `warnings` never see.
"""

import math
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import permutations
from typing import NamedTuple

import numpy as np
from jax.sharding import PartitionSpec

from treeshard._errors import TreeShardError, warn
from treeshard._mesh import AnyMesh, axis_sizes, get_incontext_mesh
from treeshard._specs import array_text, entry_of, with_entries

_MARK = "Involuntary full rematerialization"


class PartitionerWarning(NamedTuple):
    """A value that the partitioner could only reshard by way of a whole copy on every device.

    Attributes:
        text: The compiler's own words. What cannot be read in them is `None` below.
        op: The operation that makes the value, as the compiler names it: `"copy"`.
        dtype: Its dtype, as the compiler writes it: `"f32"`.
        shape: The shape of *one device's part* of it, which is what the compiler says.
        from_sharding: How it lies, in the compiler's notation.
        to_sharding: How it is wanted.
        from_spec: How it lies, in axes of the mesh; `None` without one, or if it does not fit.
        to_spec: How it is wanted, likewise.
        op_name: Where in the traced function it comes from: `"jit(step)/reshape"`.
        source: File and line, where the compiler says them.
    """

    text: str
    op: str | None = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    from_sharding: str | None = None
    to_sharding: str | None = None
    from_spec: PartitionSpec | None = None
    to_spec: PartitionSpec | None = None
    op_name: str | None = None
    source: str | None = None

    def __str__(self) -> str:
        """One line: what, where, from where to where."""
        if self.from_sharding is None:
            return f"unknown form of warning: {self.text}"
        dims = "" if self.shape is None else f" {array_text(self)}"
        places = [self.op_name, self.source]
        where = " at ".join(place for place in places if place) or "an unknown place"
        before, after = self.from_spec, self.to_spec
        return (
            f"{where}: {self.op or 'an operation'}{dims} per device goes from"
            f" {self.from_sharding if before is None else before} to"
            f" {self.to_sharding if after is None else after} by way of a whole copy on every"
            " device."
        )


# fd 2 belongs to the process: two captures at a time would each restore the other's.
_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def capture_partitioner_warnings(mesh: AnyMesh | None = None) -> Iterator[list[PartitionerWarning]]:
    """Catches "Involuntary full rematerialization" of whatever is compiled inside.

    It redirects file descriptor 2, the standard error of the *whole process*: what other
    threads write meanwhile is held back too. All but these warnings is passed on at the end
    of the block; if the process is killed inside, it is lost. A second thread waits for the
    first. Programs that come from a cache are not partitioned again.

    Args:
        mesh: The mesh to name shardings by; by default the one in force, if there is one.

    Yields:
        A list, filled when the block ends: a `PartitionerWarning` each.

    Raises:
        TreeShardError: If the process has no standard error to redirect.

    Warns:
        ShardingWarning: If `TF_CPP_MIN_LOG_LEVEL` says that the compiler keeps its warnings to
            itself.

    Examples:
        >>> mesh = make_mesh("data=2,fsdp=4")
        >>> def move(x):
        ...     x = with_sharding_constraint(x, P("data", None, "fsdp"), mesh) * 2
        ...     return with_sharding_constraint(x, P(None, ("fsdp", "data")), mesh)
        >>> with capture_partitioner_warnings(mesh) as found:
        ...     compiled = jax.jit(move).lower(np.ones((8, 8, 8), "float32")).compile()
        >>> found[0].from_spec, found[0].to_spec
        (P('data', None, 'fsdp'), P(None, ('fsdp', 'data')))

    Source:
        `spmd_partitioner.cc` of OpenXLA, which logs them.
    """
    mesh = get_incontext_mesh(raise_error=False) if mesh is None else mesh
    if (level := os.environ.get("TF_CPP_MIN_LOG_LEVEL", "")) in ("2", "3"):
        warn(
            f"capture_partitioner_warnings: TF_CPP_MIN_LOG_LEVEL={level} hides what it looks for."
            " Set it to 1 or less before JAX is loaded."
        )
    found: list[PartitionerWarning] = []
    with _ONE_AT_A_TIME:
        _flush()
        # Before the file is opened: that takes the lowest free descriptor.
        try:
            real = os.dup(2)
        except OSError as error:
            raise TreeShardError(
                f"capture_partitioner_warnings: file descriptor 2 is closed ({error}), so the"
                " compiler's warnings go nowhere. Open it, for instance on os.devnull."
            ) from error
        with os.fdopen(real, "wb") as stderr, tempfile.TemporaryFile() as sink:
            os.dup2(sink.fileno(), 2)
            try:
                yield found
            finally:
                _flush()
                os.dup2(stderr.fileno(), 2)
                sink.seek(0)
                for line in sink:
                    if _MARK.encode() in line:
                        found.append(read_warning(line.decode(errors="replace").strip(), mesh))
                    else:
                        stderr.write(line)


def _flush() -> None:
    if sys.stderr is not None:
        sys.stderr.flush()


# ------------------------------------------------------------------ reading

_FROM_TO = re.compile(r"from sharding (\{.*?\}) to (\{.*?\}) (?:efficiently|without doing)")
_OPERATION = re.compile(r"HLO operation:? %?[\w.\-]+ = (\w+)\[([\d,]*)\](?:\{[^}]*\})? ([\w\-]+)\(")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_SOURCE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_TILES = re.compile(r"\{devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))(.*)\}")


def read_warning(text: str, mesh: AnyMesh | None) -> PartitionerWarning:
    """Reads one line; what it does not say in a form known here stays `None`."""
    found = PartitionerWarning(text)
    if moved := _FROM_TO.search(text):
        before, after = moved.groups()
        found = found._replace(from_sharding=before, to_sharding=after)
        if mesh is not None:
            specs = spec_of_tiles(before, mesh), spec_of_tiles(after, mesh)
            found = found._replace(from_spec=specs[0], to_spec=specs[1])
    # A sharding may have a name of its own: only the operation's is wanted.
    operation = text[text.find("HLO operation") :] if "HLO operation" in text else ""
    if head := _OPERATION.match(operation):
        found = found._replace(dtype=head[1], shape=_numbers(head[2]), op=head[3])
    if name := _OP_NAME.search(operation):
        found = found._replace(op_name=name[1])
    if source := _SOURCE.search(operation):
        found = found._replace(source=f"{source[1]}:{source[2]}")
    return found


def spec_of_tiles(sharding: str, mesh: AnyMesh) -> PartitionSpec | None:
    """A sharding in the compiler's notation as a spec; `None` if no spec of this mesh is it.

    `{devices=[2,1,4]<=[8]}` splits dim 0 in 2 and dim 2 in 4; the devices in order of the tiles
    are those of `<=[...]`, transposed by `T(...)`, or are listed.
    """
    if sharding == "{replicated}":
        return PartitionSpec()
    match = _TILES.fullmatch(sharding)
    if match is None or match[5].strip() not in ("", "last_tile_dim_replicate"):
        return None
    tiles = _numbers(match[1])
    if match[2] is None:
        devices = np.array(_numbers(match[4]))
    else:
        grid = np.arange(math.prod(_numbers(match[2]))).reshape(_numbers(match[2]))
        devices = grid.transpose(_numbers(match[3]) if match[3] else None).reshape(-1)
    count = math.prod(axis_sizes(mesh).values())
    if math.prod(tiles) != count or not np.array_equal(np.sort(devices), np.arange(count)):
        return None
    dims = len(tiles) - bool(match[5].strip())
    places = np.unravel_index(np.argsort(devices), tiles)[:dims]
    axes = [_axes_that_count(place, n, mesh) for place, n in zip(places, tiles, strict=False)]
    if any(found is None for found in axes):
        return None
    return with_entries(PartitionSpec(), [entry_of(found or ()) for found in axes])


def _axes_that_count(place: np.ndarray, parts: int, mesh: AnyMesh) -> Sequence[str] | None:
    """The axes, outermost first, along which the devices count a dim's parts off."""
    sizes = {axis: size for axis, size in axis_sizes(mesh).items() if size > 1}
    grid = np.indices(tuple(sizes.values())).reshape(len(sizes), -1)
    index = dict(zip(sizes, grid, strict=True))
    for length in range(len(sizes) + 1):
        for axes in permutations(sizes, length):
            if math.prod(sizes[axis] for axis in axes) != parts:
                continue
            along = np.zeros_like(place)
            for axis in axes:
                along = along * sizes[axis] + index[axis]
            if np.array_equal(along, place):
                return axes
    return None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)
