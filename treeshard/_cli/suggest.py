"""`treeshard suggest`: which mesh and which rules, for a model on given devices."""

import argparse
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence

import jax

from treeshard._cli.compile import model_options, share_freed_memory
from treeshard._cli.functions import call_function, load_function
from treeshard._core.make_mesh import simulate_devices
from treeshard.errors import FormatError, did_you_mean
from treeshard.programs import Strategy, suggest
from treeshard.programs._candidates import NAMED
from treeshard.programs._suggest import CACHE

_IN_CHILD = "TREESHARD_SUGGEST_CHILD"
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}


def run_suggest(options: argparse.Namespace) -> tuple[str, int]:
    """Prints meshes and strategies, the best first. Returns 1 if none is known to fit."""
    if _IN_CHILD not in os.environ:
        return "", _in_children(options.arguments)
    share_freed_memory()
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


def _in_children(arguments: Sequence[str]) -> int:
    """Runs the command in a process of its own, which a failed check inside XLA may end. Then runs
    it again: it leaves out the program that was compiled, and reads what is known of the others."""
    command = [sys.executable, "-m", "treeshard", *arguments]
    signal.signal(signal.SIGINT, lambda *_: None)  # which the child gets too, and reports
    while True:
        before = _abandoned()
        code = subprocess.call(command, env={**os.environ, _IN_CHILD: "1"})
        if code >= 0 or _abandoned() == before:
            return code if code >= 0 else 128 - code
        print("the compiler ended its process: going on without it", file=sys.stderr)


def _abandoned() -> set[str]:
    return {file.name for file in CACHE.expanduser().glob("*.compiling")}


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
