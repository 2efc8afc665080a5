"""Compiles the planted mistakes for a TPU or a GPU, and keeps their texts for tests.

    PYTHONPATH=.:tests:tests/product python tests/targets/make_mistakes.py v5e:2x4

needs `treeshard[tpu,cuda]`, but no such device. With names of cases, only these.
"""

import json
import lzma
import sys
from typing import Any

import test_planted_mistakes as planted
from make_texts import trim_spec

import treeshard as ts


def main(target: str, *names: str) -> None:
    path = planted.STORED / f"{target.replace(':', '_')}.json.xz"
    texts = dict(planted.stored(target)) if names else {}
    for name, case in planted.CASES.items():
        if names and name not in names:
            continue
        if target not in planted.ONLY.get(name, (target,)):
            continue
        for side in ("wrong", "right"):

            def compiled(lowered: Any, key: str = f"{name}/{side}") -> str:
                texts[key] = trim_spec(lowered.compile().as_text())
                return texts[key]

            mesh = ts.make_mesh(case.axes, topology=target)
            print(name, side, planted.report(mesh, compile_=compiled, **case.options(side)))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(lzma.compress(json.dumps(texts, sort_keys=True).encode()))


if __name__ == "__main__":
    ts.simulate_devices(8)
    main(*sys.argv[1:])
