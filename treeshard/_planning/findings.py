"""One error or warning about a plan."""

from typing import Literal, NamedTuple

from treeshard._core.text import fold_paths


class Finding(NamedTuple):
    """One error or warning about a plan.

    Attributes:
        code: Errors: `"unmatched"`, `"rank"`, `"axis-not-in-mesh"`, `"axis-already-used"`,
            `"already-sharded"`, `"indivisible"`, `"path-collision"`. Warnings: `"dead-rule"`,
            `"shadowed-rule"`, `"explicit-spec-too-small"`, `"tied"`, `"no-base"`,
            `"cuts-block"`, `"left-whole"`, `"scan-dim"`, `"axis-order"`, `"zero1-no-op"`,
            `"matrix-optimizer"`, `"not-elementwise"`, `"name-without-rule"`.
        severity: `"error"` if `Plan.check` raises for it, else `"warning"`.
        fact: What is wrong.
        fix: What to do about it.
        paths: The paths of the leaves concerned; empty for a rule that matches no leaf.
        rule: The index of the rule concerned, or `None`.
        wasted: For replicated leaves (`"left-whole"`, `"zero1-no-op"`) and for `"indivisible"`,
            the bytes that each device could save.
    """

    code: str
    severity: Literal["error", "warning"]
    fact: str
    fix: str
    paths: tuple[str, ...] = ()
    rule: int | None = None
    wasted: int = 0

    def __str__(self) -> str:
        """One line, the paths of repeated layers folded: `layers/{0..79}/attn/q`."""
        paths = fold_paths(self.paths)
        shown = ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" * (len(paths) > 5))
        where = f"{shown}: " if shown and self.code != "shadowed-rule" else ""
        return f"{self.severity} {self.code}: {where}{self.fact} {self.fix}"
