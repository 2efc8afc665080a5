"""Captures the warnings of XLA's partitioner.

XLA writes them to the standard error of the process, where Python's `warnings` do not see them.
"""

import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from jax.sharding import PartitionSpec

from treeshard._core.arrays import array_text
from treeshard._core.mesh import AnyMesh, MeshLike, as_mesh, get_incontext_mesh
from treeshard.communication._device_groups import spec_of_sharding
from treeshard.errors import TreeShardError, warn

_MARK = "Involuntary full rematerialization"


class PartitionerWarning(NamedTuple):
    """A value that the partitioner could reshard only through a full copy on every device.

    Attributes:
        text: The compiler's message. The fields below are `None` if it does not say them.
        op: The operation that produces the value, as the compiler names it: `"copy"`.
        dtype: Its dtype, as the compiler writes it: `"f32"`.
        shape: The shape of *one device's shard* of it, which is what the compiler prints.
        from_sharding: How the value is sharded, in the compiler's notation.
        to_sharding: How it has to be sharded.
        from_spec: `from_sharding` as a spec; `None` without a mesh, or if no spec of it fits.
        to_spec: `to_sharding` as a spec, likewise.
        op_name: Its place in the traced function: `"jit(step)/reshape"`.
        source: `file:line`, if the compiler prints it.
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
        """One line: where, which array, and how it is resharded."""
        if self.from_sharding is None:
            return f"partitioner warning in an unknown format: {self.text}"
        dims = "" if self.shape is None else f" {array_text(self)}"
        where = " at ".join(filter(None, [self.op_name, self.source])) or "unknown location"
        before, after = self.from_spec, self.to_spec
        return (
            f"{where}: {self.op or 'an operation'}{dims} per device is resharded from"
            f" {self.from_sharding if before is None else before} to"
            f" {self.to_sharding if after is None else after} through a full copy on every device."
        )


# File descriptor 2 is process-wide: two concurrent captures would restore each other's.
_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def capture_partitioner_warnings(
    mesh: MeshLike | None = None,
) -> Iterator[list[PartitionerWarning]]:
    """Captures the "Involuntary full rematerialization" warnings of programs compiled inside.

    It redirects file descriptor 2, the standard error of the *whole process*, so that output of
    other threads is held back too. At the end of the block everything except these warnings is
    written to standard error; if the process is killed inside the block, it is lost. A second
    thread waits for the first. Programs from a cache are not partitioned, and give no warnings.

    Args:
        mesh: The mesh to name shardings by; by default the current one, if any.

    Yields:
        A list that is filled when the block ends, with a `PartitionerWarning` for each.

    Raises:
        TreeShardError: If the process has no standard error to redirect.

    Warns:
        ShardingWarning: If `TF_CPP_MIN_LOG_LEVEL` suppresses the compiler's warnings.

    Examples:
        >>> mesh = make_mesh("data=2,fsdp=4")
        >>> def move(x):
        ...     x = with_sharding_constraint(x, P("data", None, "fsdp"), mesh) * 2
        ...     return with_sharding_constraint(x, P(None, ("fsdp", "data")), mesh)
        >>> with capture_partitioner_warnings(mesh) as warnings:
        ...     compiled = jax.jit(move).lower(np.ones((8, 8, 8), "float32")).compile()
        >>> warnings[0].from_spec, warnings[0].to_spec
        (P('data', None, 'fsdp'), P(None, ('fsdp', 'data')))

    Source:
        `spmd_partitioner.cc` of OpenXLA logs them.
    """
    mesh = get_incontext_mesh(raise_error=False) if mesh is None else as_mesh(mesh)
    if (level := os.environ.get("TF_CPP_MIN_LOG_LEVEL", "")) in ("2", "3"):
        warn(
            f"capture_partitioner_warnings: TF_CPP_MIN_LOG_LEVEL={level} suppresses the compiler's"
            " warnings. Set it to 1 or less before JAX is imported."
        )
    captured: list[PartitionerWarning] = []
    with _ONE_AT_A_TIME:
        _flush()
        # Duplicate it before opening the file, which would take descriptor 2 if it is free.
        try:
            real = os.dup(2)
        except OSError as error:
            raise TreeShardError(
                f"capture_partitioner_warnings: file descriptor 2 is closed ({error}), so there is"
                " no standard error to capture. Open it, for instance on os.devnull."
            ) from error
        with os.fdopen(real, "wb") as stderr, tempfile.TemporaryFile() as sink:
            os.dup2(sink.fileno(), 2)
            try:
                yield captured
            finally:
                _flush()
                os.dup2(stderr.fileno(), 2)
                sink.seek(0)
                for line in sink:
                    if _MARK.encode() in line:
                        captured.append(read_warning(line.decode(errors="replace").strip(), mesh))
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


def read_warning(text: str, mesh: AnyMesh | None) -> PartitionerWarning:
    """Parses one line. Fields that the line does not have in a known format stay `None`."""
    warning = PartitionerWarning(text)
    if moved := _FROM_TO.search(text):
        before, after = moved.groups()
        warning = warning._replace(from_sharding=before, to_sharding=after)
        if mesh is not None:
            specs = spec_of_sharding(before, mesh), spec_of_sharding(after, mesh)
            warning = warning._replace(from_spec=specs[0], to_spec=specs[1])
    # A sharding may have metadata too, so search after the operation only.
    operation = text[text.find("HLO operation") :] if "HLO operation" in text else ""
    if head := _OPERATION.match(operation):
        shape = tuple(int(dim) for dim in head[2].split(",") if dim)
        warning = warning._replace(dtype=head[1], shape=shape, op=head[3])
    if name := _OP_NAME.search(operation):
        warning = warning._replace(op_name=name[1])
    if source := _SOURCE.search(operation):
        warning = warning._replace(source=f"{source[1]}:{source[2]}")
    return warning
