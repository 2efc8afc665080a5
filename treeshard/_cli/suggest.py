"""`treeshard suggest`: which mesh and which rules, for a model on given devices."""

import argparse
import re
import sys

import jax

from treeshard._cli.compile import model_options
from treeshard._cli.functions import call_function, load_function
from treeshard._core.make_mesh import simulate_devices
from treeshard.errors import FormatError, did_you_mean
from treeshard.programs import Strategy, suggest
from treeshard.programs._candidates import NAMED

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}


def run_suggest(options: argparse.Namespace) -> tuple[str, int]:
    """Prints meshes and strategies, the best first. Returns 1 if none is known to fit."""
    model = model_options(options)
    budget = None if options.budget is None else _seconds(options.budget)
    if options.topology is None and options.devices is not None:
        simulate_devices(options.devices)
        jax.config.update("jax_platforms", "cpu")
    function = load_function(options.function)
    found = call_function(
        options.function,
        lambda: suggest(
            function,
            topology=options.topology,
            devices=options.devices,
            memory=options.memory,
            global_batch=options.global_batch,
            strategies=_strategies(options),
            top=options.top,
            budget=budget,
            progress=True,
            **model,
        ),
    )
    text = found.to_json() if options.json else str(found)
    return text, int(found.best is None or found.best.fits is not True)


def _strategies(options: argparse.Namespace) -> list[str | Strategy] | None:
    """Names, and those that `STRATEGIES` of the user's module lists."""
    module = sys.modules[options.function.partition(":")[0]]
    own = {one.name: one for one in getattr(module, "STRATEGIES", ())}
    if options.strategies is None:
        return [*NAMED, *own.values()] if own else None
    chosen: list[str | Strategy] = []
    for name in options.strategies.split(","):
        if name not in own and name not in NAMED:
            hint = did_you_mean(name, [*NAMED, *own])
            raise FormatError(
                f"--strategies: there is no {name!r}.{hint} Known are {', '.join([*NAMED, *own])}."
            )
        chosen.append(own.get(name, name))
    return chosen


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if match is None:
        raise FormatError(f"--budget: {text!r} is not a time. Write 90s, 10m or 2h.")
    return float(match[1]) * _SECONDS[match[2]]
