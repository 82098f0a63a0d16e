"""What a report says, in sentences: for the terminal and the page."""

from __future__ import annotations

from kvview_reference.sizing.sweep import ENOUGH, SizeReport


def explain(report: SizeReport) -> list[str]:
    """The answer first, then what it rests on."""
    return [*_answer(report), *report.notes, *_basis(report)]


def _answer(report: SizeReport) -> list[str]:
    alone, most = report.no_connector_hit_rate, report.unlimited_hit_rate
    lines = ["There is no GPU cache: all hits are the host's."]
    if report.gpu_blocks:
        lines = [
            f"The GPU's {_gpu_size(report)} alone: {alone:.1%} of the prompt blocks are hits; a "
            "host adds to that."
        ]
    if report.enough_host_blocks:
        enough = blocks_and_gib(report, report.enough_host_blocks)
        lines += [
            f"{enough} are enough: with LRU they win {ENOUGH:.0%} of what any host can win "
            f"({most - alone:.1%} of the prompt blocks).",
            f"Beyond {blocks_and_gib(report, report.full_host_blocks)} nothing is won.",
        ]
    else:
        lines.append("No host wins anything: what is asked for again, the GPU has.")
    return lines


def _basis(report: SizeReport) -> list[str]:
    lines = [
        "Order, not time: requests are served one after another, as they came; kvview replay TRACE "
        "plays a size in time.",
        "At most: what no policy exceeds with GPU and host together, knowing the future (MIN "
        f"with bypass, {'exact' if report.sampling_rate == 1 else 'sampled'}).",
        "Of LRU: blocks stored out of the GPU for each one loaded in again; seconds of prefill "
        f"saved, at {report.prefill_tokens_per_s:,.0f} tokens/s; GB/s in the busiest sixtieth of "
        f"the trace ({report.trace_seconds / 60:,.0f} s).",
    ]
    if report.model is None:
        lines.append("Sizes in GiB need a model: --model config.json, or --layers and so on.")
    else:
        name = f"{report.model.name}: " if report.model.name else ""
        lines += [f"{name}{part.formula}." for part in report.model.layers]
    if report.sampling_rate < 1:
        lines.append(f"Sampled by block: {report.sampling_rate:.2%} of the blocks (SHARDS).")
    if report.requests_too_large:
        lines.append(
            f"{report.requests_too_large:,} requests do not fit on the GPU and were passed over."
        )
    return lines


def _gpu_size(report: SizeReport) -> str:
    blocks = f"{report.gpu_blocks:,} blocks"
    return blocks if report.gpu_gib is None else f"{blocks} ({report.gpu_gib:,.1f} GiB)"


def blocks_and_gib(report: SizeReport, blocks: int) -> str:
    """A size, in GiB too where a model is known."""
    if report.model is None:
        return f"{blocks:,} host blocks"
    return f"{blocks:,} host blocks ({blocks * report.model.block_bytes / 2**30:,.1f} GiB)"
