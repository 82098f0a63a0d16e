"""The figures of a replay, and the sentences about missing stores, missing hits and failures."""

from __future__ import annotations

from kvview.errors import line_of
from kvview_reference.replay.run import ReplayReport


def figures_of(report: ReplayReport) -> list[tuple[str, str, bool]]:
    """List the figures of the table: name, value, and whether the value shows a fault."""

    def hits(name: str, number: int, share: float) -> tuple[str, str, bool]:
        return name, f"{number:,}  ({share:.1%})", False

    def figure(name: str, number: int, *, is_bad: bool = False) -> tuple[str, str, bool]:
        return name, f"{number:,}", is_bad

    def fault(name: str, number: int) -> tuple[str, str, bool]:
        return figure(name, number, is_bad=number != 0)

    computed = report.blocks - report.gpu_hit_blocks - report.cpu_hit_blocks
    return [
        figure("requests", report.requests),
        figure("requests too large", report.requests_too_large),
        figure("blocks", report.blocks),
        hits("hit on the GPU", report.gpu_hit_blocks, report.gpu_hit_rate),
        hits(f"hit on the {report.tier} tier", report.cpu_hit_blocks, report.cpu_hit_rate),
        hits("computed", computed, report.computed_rate),
        figure("blocks offloaded", report.offloaded_blocks),
        figure("blocks loaded", report.loaded_blocks),
        figure("bytes verified", report.bytes_verified),
        fault("mismatches", report.mismatches),
        fault("holds left at the end", report.holds_at_end),
        figure("preemptions", report.preemptions),
        fault("failed transfers", report.failed_transfers),
        fault("malformed rows", report.malformed_rows),
        ("seconds", f"{report.seconds:.1f}", False),
        ("blocks per second", f"{report.blocks_per_s:,.0f}", False),
    ]


def explain(report: ReplayReport) -> list[str]:
    """Write sentences about the order of requests, missing stores or hits, and failed transfers."""
    lines = [
        f"Closed loop: {report.closed_loop} requests at once, in the order of the trace; "
        "arrival times are ignored."
    ]
    if report.offloaded_blocks and not report.cpu_hit_blocks and not report.failed_transfers:
        lines.append(
            f"Nothing was hit on the {report.tier} tier, though {report.offloaded_blocks:,} "
            "blocks were offloaded. The tier may be too small to keep a block until its next use: "
            "make it larger ('kvview size' computes how much is worth it). Otherwise the GPU hits "
            "every block, no block is used again, or the connector does not find the blocks that "
            "it stored ('kvview check')."
        )
    if not report.offloaded_blocks and not report.failed_transfers:
        lines.append(
            "The connector stored no block. In the mode 'victim', a connector stores a block when "
            "the GPU evicts it, and a large GPU cache may hold every block: try fewer blocks, such "
            "as '--gpu-blocks 500'."
        )
    if report.failed_transfers:
        lines.append(
            f"{report.failed_transfers:,} transfers failed. A replay injects no failures, so these "
            f"are the connector's own, first {line_of(report.first_failure)}. The blocks that "
            "failed to load were computed, so no token is wrong; check whether the failures are "
            "intended."
        )
    return lines
