"""A process that is killed, stopped for 20 s or late: the others end in time, and name it."""

import os
from pathlib import Path

from tests.multiprocess import launcher, lost_checks

SOAK = bool(os.environ.get("TREESHARD_SOAK"))
CASES = ["save,kill,8", "step,kill,8"]
# Of 32 processes, with timeouts below and above the 20 s.
ALL_CASES = [
    *(f"{what},kill,10" for what in ("save", "restore", "step")),
    *(
        f"{what},{fault},{timeout}"
        for what in ("save", "restore", "step")
        for fault in ("stop", "late")
        for timeout in (10, 120)
    ),
]


def test_the_others_name_it(tmp_path: Path) -> None:
    """Of 32 processes in `make soak`."""
    args = ["32", *ALL_CASES] if SOAK else ["4", *CASES]
    timeout = 3600.0 if SOAK else 200.0
    verdicts = launcher.launch(lost_checks, tmp_path, processes=1, args=args, timeout=timeout)
    for check in launcher.checks_of(lost_checks):
        verdicts.assert_passed(check)
