"""What the code of a step puts on one device, which has no effect in a program for several."""

import os
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from treeshard.errors import listed, warn

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


def warn_of_device_puts(jaxpr: Any, where: str) -> None:
    """Warns once of all `jax.device_put` to one device in a traced step."""
    facts = [
        f"`device_put` of {array} to {device} at {source}"
        for array, device, source in dict.fromkeys(_device_puts(jaxpr))
    ]
    if facts:
        headline = f"{where}: {len(facts)} calls in the step put arrays on one device:"
        message = listed(headline, facts, headed=True)
        warn(
            f"{message}\nThe program runs on all devices of the mesh, so this has no effect. Put"
            " arrays on one device outside of the step; in it, write"
            " `treeshard.with_sharding_constraint`."
        )


def _device_puts(jaxpr: Any) -> Iterator[tuple[str, str, str]]:
    """The array, the device and the source line of each."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "device_put":
            for variable, target in zip(eqn.invars, eqn.params["devices"], strict=True):
                if isinstance(target, SingleDeviceSharding):
                    [target] = target.device_set
                if isinstance(target, jax.Device):
                    yield variable.aval.str_short(), str(target), _source(eqn)
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from _device_puts(inner)


def _source(eqn: Any) -> str:
    """The innermost line that is neither treeshard's nor another package's, as `file:line`."""
    traceback = eqn.source_info.traceback
    lines = [] if traceback is None else [f"{x.file_name}:{x.line_num}" for x in traceback.frames]
    own = [line for line in lines if not re.search(r"/(site|dist)-packages/|^<", line)]
    outside = [line for line in own if not line.startswith(_PACKAGE)]
    return next(iter(outside or own or lines), "an unknown line")


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")
