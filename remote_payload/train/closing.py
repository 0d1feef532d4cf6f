"""The last lines of a run's log: what was learned, in one short table."""

from __future__ import annotations

from typing import Any

from remote_payload.train.checkpoint_index import Best
from remote_payload.train.run import Run


def closing_lines(run: Run, seconds: float) -> list[str]:
    """Loss, tau before and after (by kind of prompt), speed, and where things are."""
    lines = ["", *_pairs(run, seconds)]
    evaluated = [report for report in run.reports if report.record["prompts"]]
    if evaluated:
        known = evaluated[-1].record
        before = evaluated[0].record if evaluated[0].record["step"] == 0 else None
        after = known if known["step"] else None
        lines += ["", "tau on held-out prompts     before    after   prompts"]
        for kind in sorted(known["by_kind"]):
            one, other = (_tau(record and record["by_kind"].get(kind)) for record in (before, after))
            lines.append(f"  {kind:<24} {one:>8} {other:>8} {known['by_kind'][kind]['prompts']:>9}")
        one, other = _tau(before), _tau(after)
        lines.append(f"  {'all (over rounds)':<24} {one:>8} {other:>8} {known['prompts']:>9}")
        one, other = _tau(before, "tau_macro"), _tau(after, "tau_macro")
        lines.append(f"  {'all (over prompts)':<24} {one:>8} {other:>8}")
        if after is not None and after["step"] != run.step:
            lines.append(f"  after: step {after['step']}, the newest that was evaluated")
        lines.append(f"  {known['tokens']} tokens decoded, {_equality(known)}")
    return lines


def _tau(record: dict[str, Any] | None, name: str = "tau") -> str:
    """Of an evaluation, or of a kind of its prompts: a resumed run may have had others before."""
    return _number(record[name] if record else None)


def _equality(record: dict[str, Any]) -> str:
    """Whether the texts are the target's own, and how sure that is."""
    wrong = record["diverged"] - record["diverged_allowed"]
    if wrong:
        return f"{wrong} texts are NOT the target's own: decoding is not lossless"
    if record["diverged"]:
        return f"equal to the target's own greedy text but for {record['diverged']} ties"
    return "equal to the target's own greedy text"


def _pairs(run: Run, seconds: float) -> list[str]:
    values = run.progress.values
    times = [
        f"{name} {value:.3f} s"
        for name, value in (("eager", run.eager_step_s), ("compiled", run.compiled_step_s))
        if value
    ]
    rows = [
        ("steps", f"{run.step} of {run.steps}" + (" (stopped on request)" if run.stopped else "")),
        ("loss, first and last", f"{_number(run.first_loss)}  {_number(run.last_loss)}"),
        ("execution", f"{values['execution']} (a step: {', '.join(times) or 'not measured'})"),
        ("training tokens/s", f"{run.tokens_per_s:,.0f}" if run.tokens_per_s else "-"),
        ("time", f"{seconds:.0f} s"),
        ("checkpoint", str(run.saved) if run.saved else "none"),
        *([("best", _best(run, run.best))] if run.best else []),
        *([("not evaluated", f"{run.unevaluated} times, for want of memory")] if run.unevaluated else []),
    ]
    return [f"{name:<26} {value}" for name, value in rows]


def _best(run: Run, best: Best) -> str:
    path = run.best_path
    return f"tau {best.tau:.3f} at step {best.step}, {path or 'its checkpoint is gone'}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
