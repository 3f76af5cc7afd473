"""A report of ``bench graphs`` as one picture. Knows no model; needs matplotlib, which is the
``bench`` extra."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duograph.server.bench.graphs_report import UNITS, PhaseFigures, Report, padding
from duograph.server.options import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def require_matplotlib() -> None:
    """Raises UsageError if it is not installed: better before a measurement than after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--png needs matplotlib: pip install 'duograph[bench]'")


def draw(report: Report, path: Path) -> None:
    """A row of three panels for each phase: time of a step, cost of the capture, cost of padding.

    Raises:
        UsageError: matplotlib is not installed.
        OSError, ValueError: ``path`` cannot be written, or has no ending that is a picture's.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    # not pyplot: it keeps figures for ever and looks for a display
    figure = Figure(figsize=(16, 4.5 * len(report.phases)), layout="constrained")
    axes: Any = figure.subplots(len(report.phases), 3, squeeze=False)
    for phase, (times, captures, paddings) in zip(report.phases, axes, strict=True):
        _draw_times(times, phase)
        _draw_captures(captures, phase)
        _draw_padding(paddings, phase)
    note = "; recorded graphs save no time" if report.saves_nothing else ""
    figure.suptitle(f"{report.model} on {report.device}, {report.backend} graphs{note}")
    figure.savefig(path, dpi=110)


def _draw_times(axes: Axes, phase: PhaseFigures) -> None:
    sizes = [one.size for one in phase.sizes]
    axes.plot(sizes, [one.eager_ms for one in phase.sizes], marker=".", label="eager")
    axes.plot(sizes, [one.graph_ms for one in phase.sizes], marker=".", label="graph")
    compiled = [(one.size, one.compiled_ms) for one in phase.sizes if one.compiled_ms is not None]
    if compiled:
        axes.plot(*zip(*compiled, strict=True), marker="x", ls="--", label="graph + compile")
    axes.set(xscale="log", yscale="log", ylabel="ms a step", title=f"{phase.phase}: one step")
    _finish(axes, phase)


def _draw_captures(axes: Axes, phase: PhaseFigures) -> None:
    sizes = [one.size for one in phase.sizes]
    seconds = [1e3 * one.capture_seconds for one in phase.sizes]
    axes.plot(sizes, seconds, marker=".", color="tab:green", label="ms to capture")
    axes.plot(
        sizes, [one.nbytes / 2**20 for one in phase.sizes], marker=".", color="tab:red", label="MiB"
    )
    axes.set(xscale="log", yscale="symlog", title=f"{phase.phase}: capture")
    axes.set_ylim(bottom=0)
    _finish(axes, phase)


def _draw_padding(axes: Axes, phase: PhaseFigures) -> None:
    sizes = [one.size for one in phase.sizes]
    costs = [padding(phase.sizes, index) for index in range(len(sizes))]
    axes.plot(sizes, [100 * c.worst_share for c in costs], marker=".", label="worst: % padded")
    axes.plot(sizes, [100 * c.mean_share for c in costs], marker=".", label="mean: % padded")
    relative = [100 * c.worst_ms / one.graph_ms for c, one in zip(costs, phase.sizes, strict=True)]
    axes.plot(sizes, relative, marker="x", ls="--", label="worst: % of the step's time")
    axes.set(xscale="log", ylabel="%", title=f"{phase.phase}: padding")
    _finish(axes, phase)


def _finish(axes: Axes, phase: PhaseFigures) -> None:
    axes.set_xlabel(UNITS[phase.phase])
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend()
