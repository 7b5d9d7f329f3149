"""Plans and measurements as text for people."""

from __future__ import annotations

from collections.abc import Iterable

from xmlc.memory.terms import Plan, Term

MEBIBYTE = 1 << 20


def plan_table(plan: Plan, explain: bool) -> str:
    """Return the peak of each phase, and with ``explain`` every term with its formula."""
    lines = [f"{'phase':16}{'planned':>14}"]
    for phase in plan.added:
        lines.append(f"{phase:16}{mebibytes(plan.bytes(phase)):>14}")
        if explain:
            lines += _terms(plan.added[phase])
    if explain:
        lines += ["", "held throughout"]
        lines += _terms(plan.held)
        if plan.mapped:
            lines += ["", "on the disk, not counted"]
            lines += _terms(plan.mapped)
    binding = plan.binding
    lines += [
        "",
        f"peak {mebibytes(plan.peak_bytes)} in {plan.peak_phase}; the largest part is {binding.name}, "
        f"{mebibytes(binding.bytes)}",
    ]
    if plan.mapped:
        size = sum(term.bytes for term in plan.mapped)
        lines.append(f"beside {mebibytes(size)} on the disk (training.storage)")
    return "\n".join(lines)


def mebibytes(size: float) -> str:
    """Return bytes as MiB."""
    return f"{size / MEBIBYTE:,.1f} MiB"


def _terms(terms: Iterable[Term]) -> list[str]:
    return [f"    {term.name:44}{mebibytes(term.bytes):>14}  {term.formula}" for term in terms]
