"""The sentences of a report."""

from __future__ import annotations

from kvview_reference.sizing.accounts import PEAK_SECONDS
from kvview_reference.sizing.sweep import SizeReport


def explain(report: SizeReport) -> list[str]:
    """Write the gain of a host, then the warnings, and then the basis of the figures."""
    alone, most = report.no_connector_hit_rate, report.unlimited_hit_rate
    lines = ["Without a GPU cache, the host has all hits."]
    if report.gpu_blocks:
        size = _blocks_and_gib(report, report.gpu_blocks, "GPU")
        lines = [f"{size} alone hit {alone:.1%} of the prompt blocks; a host adds to that."]
    if report.knee_host_blocks:
        lines += [
            f"Knee: {_blocks_and_gib(report, report.knee_host_blocks)} with LRU gain "
            f"{report.knee_share:.0%} of the gain of any host ({most - alone:.1%} of the prompt "
            "blocks). Beyond the knee a block gains less than on average.",
            f"Beyond {_blocks_and_gib(report, report.full_host_blocks)} nothing is gained.",
        ]
    else:
        lines.append("No host gains anything: the GPU has every block that is used again.")
    return [*lines, *report.notes, *_basis(report)]


def _basis(report: SizeReport) -> list[str]:
    lines = [
        "Order, not time: requests are served one after another, in the order of arrival; "
        "'kvview replay TRACE' simulates one size in time.",
        "At most: the hits that no policy exceeds with GPU and host together, even if it knows the "
        "future (MIN with bypass, exact).",
        "With LRU: blocks stored to the host for each block loaded; seconds of prefill saved, at "
        f"{report.prefill_tokens_per_s:,.0f} tokens/s; GB/s in the busiest {PEAK_SECONDS:.0f} s.",
    ]
    if report.model is None:
        lines.append("Sizes in GiB need a model: --model config.json.")
    else:
        name = f"{report.model.name}: " if report.model.name else ""
        lines += [f"{name}{part.formula}." for part in report.model.layers]
    if report.requests_too_large:
        lines.append(
            f"{report.requests_too_large:,} requests do not fit on the GPU and were skipped."
        )
    return lines


def _blocks_and_gib(report: SizeReport, blocks: int, tier: str = "host") -> str:
    """Write a size in blocks and, with a model, also in GiB."""
    text = f"{blocks:,} {tier} blocks"
    if report.model is None:
        return text
    return f"{text} ({blocks * report.model.block_bytes / 2**30:,.1f} GiB)"
