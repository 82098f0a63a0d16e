"""The hit curve as an SVG file."""

from __future__ import annotations

from matplotlib import rc_context
from matplotlib.figure import Figure

from kvview.errors import ConfigError
from kvview_reference.sizing.hit_curve import SizeReport


def write_chart(report: SizeReport, path: str) -> None:
    """Draw LRU and the optimum by the size of the cache, on a logarithmic axis.

    Raises:
        ConfigError: The file cannot be written.
    """
    scale = 1.0 if report.block_bytes is None else report.block_bytes / 2**30
    first = max(1, report.full_blocks // 200)
    curve = [(blocks, rate) for blocks, rate in report.lru_curve if blocks >= first]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        [blocks * scale for blocks, _ in curve], [100 * rate for _, rate in curve], label="LRU"
    )
    axes.plot(
        [point.blocks * scale for point in report.points if point.blocks],
        [100 * point.optimum_hit_rate for point in report.points if point.blocks],
        linestyle="--",
        marker=".",
        label="optimum (knows the future)",
    )
    if report.knee_blocks:
        at = report.knee_blocks * scale
        axes.axvline(at, color="grey", linewidth=0.8)
        axes.annotate(f" knee: {at:,.4g}", (at, 0), color="grey")
    axes.set(
        title=report.trace.replace("$", r"\$"),  # otherwise the start of a formula
        xlabel="blocks" if report.block_bytes is None else "GiB",
        ylabel="hit blocks (% of the prompt blocks)",
        xscale="log",
        ylim=(0, None),
    )
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.legend()
    axes.grid(alpha=0.3)
    with rc_context({"svg.hashsalt": "kvview"}):
        try:
            figure.savefig(path, format="svg", metadata={"Date": None})
        except OSError as error:
            raise ConfigError(f"--chart {path!r}: {error.strerror}") from error
