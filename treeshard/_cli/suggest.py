"""`treeshard suggest`: which mesh and which rules, for a model on given devices.

Only a candidate that was compiled counts as fitting: an estimate is a lower bound, and a script
that reads the exit code would start a run on it.
"""

import argparse
import re
import sys

import jax

from treeshard._cli.functions import call_function, load_function
from treeshard._core.make_mesh import simulate_devices
from treeshard.errors import FormatError, did_you_mean
from treeshard.programs import Strategy, suggest
from treeshard.programs._candidates import NAMED

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}


def run_suggest(options: argparse.Namespace) -> tuple[str, int]:
    """Prints meshes and strategies, the best first. Returns 1 if none is known to fit."""
    budget = None if options.budget is None else _seconds(options.budget)
    if options.topology is None and options.devices is not None:
        # Before anything asks JAX for its devices: the count of simulated ones is then fixed.
        simulate_devices(options.devices)
        jax.config.update("jax_platforms", "cpu")
    function = load_function(options.function)
    suggestion = call_function(
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
        ),
    )
    text = suggestion.to_json() if options.json else str(suggestion)
    fits = suggestion.best is not None and suggestion.best.fits
    return text, 0 if fits else 1


def _strategies(options: argparse.Namespace) -> list[str | Strategy] | None:
    """Names, and those that `STRATEGIES` of the user's module lists."""
    # `load_function` has imported it.
    module = sys.modules[options.function.partition(":")[0]]
    users = {strategy.name: strategy for strategy in getattr(module, "STRATEGIES", ())}
    if options.strategies is None:
        return [*NAMED, *users.values()] if users else None
    known = [*NAMED, *users]
    names = options.strategies.split(",")
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise FormatError(
                f"--strategies: there is no {name!r}.{hint} Known are {', '.join(known)}."
            )
    return [users.get(name, name) for name in names]


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if match is None:
        raise FormatError(f"--budget: {text!r} is not a time. Write 90s, 10m or 2h.")
    return float(match[1]) * _SECONDS[match[2]]
