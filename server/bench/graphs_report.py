"""What ``bench graphs`` has measured, as data, as a table and as JSON. Knows no model and no graph:
a report can be read again on another machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

UNITS = {"decode": "rows", "prefill": "tokens"}


class ReportError(ValueError):
    """A file that is no report; the text names it."""


@dataclass(frozen=True, kw_only=True)
class SizeFigures:
    """One captured size. Times are of a whole step, in ms.

    Attributes:
        size: rows (decode) or tokens (prefill).
        smallest: the smallest batch that is padded to this size.
        compiled_ms: with Inductor's code in the graph; None where it was not measured.
        operations: kernels, copies and fills in the size's graphs; ops of a recorded graph.
        graphs: 1 for decode, one a piece for prefill.
        capture_seconds, nbytes: of the capture; graphs share a pool, so a size's bytes are what
            the pool and the driver grew by.
    """

    size: int
    smallest: int
    eager_ms: float
    graph_ms: float
    compiled_ms: float | None
    operations: int
    graphs: int
    capture_seconds: float
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class PhaseFigures:
    """One phase; ``sizes`` ascend. ``compile_seconds`` is what Inductor's variant took to compile
    and capture."""

    phase: str
    sizes: list[SizeFigures]
    dropped: list[int]
    compile_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Report:
    model: str
    device: str
    backend: str
    kv_tokens: int
    phases: list[PhaseFigures]

    @property
    def saves_nothing(self) -> bool:
        """Recorded graphs prove that a model is graph-safe; they are no faster."""
        return self.backend == "recorded"


@dataclass(frozen=True, slots=True)
class Padding:
    """What the batches that are padded to one size pay for it.

    ``worst`` is of the smallest of them, ``mean`` of all that the size takes, each as often as
    the others. ``share`` is the part of the computed rows that is padding; ``ms`` the step's
    time less what an exact size would take, read off the line through the measured sizes.
    Below the smallest size no exact time is known and the cost is given as 0.
    """

    worst_share: float
    worst_ms: float
    mean_share: float
    mean_ms: float


def padding(figures: Sequence[SizeFigures], index: int) -> Padding:
    """The cost of padding to ``figures[index]``; ``figures`` ascend by size."""
    own = figures[index]
    batches = np.arange(own.smallest, own.size + 1)
    exact = np.interp(batches, [f.size for f in figures], [f.graph_ms for f in figures])
    extra = own.graph_ms - exact
    shares = (own.size - batches) / own.size
    return Padding(
        worst_share=float(shares[0]),
        worst_ms=float(extra[0]),
        mean_share=float(shares.mean()),
        mean_ms=float(extra.mean()),
    )


def table(report: Report) -> str:
    """Every size of every phase, and the sums."""
    lines = [f"{report.model} on {report.device}, {report.backend} graphs"]
    for phase in report.phases:
        lines += ["", *_phase_lines(phase)]
    if report.saves_nothing:
        lines += [
            "",
            "CPU graphs are recorded lists of ops: they save no time (replay and eager run the "
            "same kernels) and show that the model can be captured.",
        ]
    return "\n".join(lines)


def _phase_lines(phase: PhaseFigures) -> list[str]:
    unit = UNITS[phase.phase]
    lines = [
        f"{phase.phase}: {unit} |  eager ms |  graph ms | ratio | +compile | ops in graph | "
        "capture s |    MiB | worst padded | +ms   | mean padded | +ms"
    ]
    width = len(phase.phase) + 2 + len(unit)
    for index, one in enumerate(phase.sizes):
        cost = padding(phase.sizes, index)
        compiled = f"{one.compiled_ms:8.3f}" if one.compiled_ms is not None else f"{'':8}"
        lines.append(
            f"{one.size:{width}} | {one.eager_ms:9.3f} | {one.graph_ms:9.3f} | "
            f"{one.eager_ms / one.graph_ms:5.2f} | {compiled} | {one.operations:12} | "
            f"{one.capture_seconds:9.3f} | {one.nbytes / 2**20:6.1f} | "
            f"{100 * cost.worst_share:10.1f} % | {cost.worst_ms:5.3f} | "
            f"{100 * cost.mean_share:9.1f} % | {cost.mean_ms:5.3f}"
        )
    seconds = sum(one.capture_seconds for one in phase.sizes)
    nbytes = sum(one.nbytes for one in phase.sizes)
    graphs = sum(one.graphs for one in phase.sizes)
    total = f"{len(phase.sizes)} sizes, {graphs} graphs: {seconds:.2f} s, {nbytes / 2**20:.0f} MiB"
    if phase.dropped:
        total += f"; no memory for {phase.dropped}"
    if phase.compile_seconds is not None:
        total += f"; compiled variant: {phase.compile_seconds:.1f} s"
    return [*lines, total]


def save(report: Report, path: Path) -> None:
    """Raises OSError."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def load(path: Path) -> Report:
    """Raises ReportError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except (OSError, msgspec.DecodeError) as error:
        raise ReportError(f"{path} is no report of bench graphs: {error}") from error
