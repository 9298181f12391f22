"""Results as tables in the paper's layout: domains as columns, accuracy (or mIoU) and ECE as rows, means and passes."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from statistics import mean, stdev

from ..methods import METHODS
from ..paper.published import rows_for
from .plan import PROTOCOL, SHARED
from .results import Stored

__all__ = ["FORMATS", "differences", "paper_table", "with_paper"]


def differences(results: Sequence[Stored]) -> list[str]:
    """Why these results should not stand in one table, in words; nothing where they may."""
    told = []
    for what in ("model", "weights", "preprocess", *PROTOCOL, *SHARED, "torch", "device"):
        values = sorted({_of(stored, what) for stored in results})
        if len(values) > 1:
            told.append(f"their {what} differs: {', '.join(values)}")
    known: dict[tuple[int, str], float] = {}
    for stored in results:  # the same network on the same data is as good everywhere, whatever the files are called
        source = stored.content["fingerprint"]["source_accuracy"] or {}
        for domain, accuracy in source.items():
            before = known.setdefault((stored.result.seed, domain), accuracy)
            if abs(before - accuracy) > 0.005:
                told.append(f"their source accuracy on {domain} differs: {before:.3f}, {accuracy:.3f}")
    return list(dict.fromkeys(told))


def _of(stored: Stored, what: str) -> str:
    if what in PROTOCOL:
        return str(stored.content["protocol"].get(what))
    if what == "model":
        return str(stored.content[what])
    if what in ("weights", "preprocess"):
        return str(stored.content["fingerprint"][what])
    if what in SHARED:
        return str(stored.content["arguments"].get(what))
    return str(stored.result.origin.get(what))


def paper_table(results: Sequence[Stored], *, every: bool = False) -> tuple[list[str], list[list[str]]]:
    """Header and rows: Acc. and ECE of each method over the domains; a mean, and a deviation over several seeds.

    Of many rounds it has the first, fourth, seventh and so on, as the paper's has; or `every` one. Means are of all.
    """
    names = list(dict.fromkeys(domain.name for stored in results for domain in stored.result.domains))
    names = names if every else _some_rounds(names)
    header = ["Method", "", *(_ROUND.sub(r"\2: \1", name.replace("_", " ")) for name in names)]
    header += ["Avg.", "#Forwards", "#Backwards"]
    rows = []
    groups: dict[str, list[Stored]] = {}
    order = [method.__name__ for method in METHODS.values()]
    for stored in sorted(results, key=lambda stored: order.index(stored.result.method)):
        groups.setdefault(stored.setting, []).append(stored)
    counts = {stored.content["protocol"]["images"] for stored in results}
    most = None if None in counts else max(counts)
    several = len({stored.content["model"] for stored in results}) > 1
    for group in groups.values():
        runs = [stored.result for stored in group]
        label = group[0].label + (f", {group[0].content['model']}" if several else "")
        if (images := group[0].content["protocol"]["images"]) != most:
            label += f", {images:,} images"
        forwards, backwards = (
            mean(getattr(run, key) / len(run.domains) for run in runs) for key in ("forwards", "backwards")
        )
        score = ("Acc.", "accuracy") if any(run.miou is None for run in runs) else ("mIoU", "miou")
        for kind, key in (score, ("ECE", "ece")):
            by_name: dict[str, list[float]] = {name: [] for name in names}
            for domain in (domain for run in runs for domain in run.domains if domain.name in by_name):
                by_name[domain.name].append(100 * getattr(domain, key))
            cells = [f"{mean(values):.1f}" if values else "–" for values in by_name.values()]
            whole = [100 * getattr(r, key) for r in runs]
            average = f"{mean(whole):.2f}" + (f" ± {stdev(whole):.2f}" if len(whole) > 1 else "")
            first = kind == score[0]
            passes = [f"{forwards:,.0f}", f"{backwards:,.0f}"] if first else ["", ""]
            rows.append([label if first else "", kind, *cells, average, *passes])
    return header, rows


_ROUND = re.compile(r"(.*), round (\d+)")
_FEW = 4


def _some_rounds(names: Sequence[str]) -> list[str]:
    found = {name: int(match[2]) for name in names if (match := _ROUND.fullmatch(name))}
    rounds = set(found.values())
    if len(rounds) <= _FEW:
        return list(names)
    shown = {*range(1, max(rounds) + 1, 3), max(rounds)}
    return [name for name in names if found.get(name, 1) in shown]


def with_paper(rows: Sequence[list[str]], results: Sequence[Stored]) -> list[list[str]]:
    """Each method's rows followed by the paper's, marked as such, where all results have a setting of the paper's."""
    known = {row.method: row for row in rows_for(results[0].content)}
    out: list[list[str]] = []
    method = score = ""
    for row in rows:
        method, score = row[0] or method, score if row[1] == "ECE" else row[1]
        out.append(list(row))
        line = known.get(method)
        if row[1] == "ECE" and line is not None:
            told = [f"{method} (paper{line.note})", score, *(f"{v:.1f}" for v in line.accuracy)]
            passes = ["" if n is None else f"{n:,}" for n in (line.forwards, line.backwards)]
            out.append([*told, f"{line.average[0]:.2f}", *passes])
            if line.ece:
                out.append(["", "ECE", *(f"{v:.1f}" for v in line.ece), f"{line.average[1]:.2f}", "", ""])
    return out


def as_markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; numbers are flush right, but not the names of rows."""
    columns = list(zip(*rows, strict=True))[1:]
    rule = ["---", *("---:" if all(cell == "" or _is_number(cell) for cell in column) else "---" for column in columns)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, rule, *rows]) + "\n"


def _is_number(cell: str) -> bool:
    return cell[0].isdigit() or cell[0] in "–-"


def as_csv(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Comma-separated values."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()


_TEX = {sign: rf"\{sign}" for sign in "_#%&"} | {"±": r"$\pm$", "–": "--", "†": r"$^\dagger$", "×": r"$\times$"}
_TEX |= {"ε": r"$\epsilon$", "α": r"$\alpha$", "β": r"$\beta$"}


def as_latex(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A LaTeX tabular with booktabs' rules."""

    def line(cells: Sequence[str]) -> str:
        return " & ".join("".join(_TEX.get(sign, sign) for sign in cell) for cell in cells) + r" \\"

    body = "\n".join(line(row) for row in rows)
    columns = "ll" + "r" * (len(header) - 2)
    rule = ["\\toprule", line(header), "\\midrule", body, "\\bottomrule"]
    return "\n".join([f"\\begin{{tabular}}{{{columns}}}", *rule, "\\end{tabular}"]) + "\n"


FORMATS = {"markdown": as_markdown, "latex": as_latex, "csv": as_csv}
"""How a table can be written."""
