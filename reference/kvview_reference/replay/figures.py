"""The figures of a replay, and the sentences about its timing, missing hits and failures."""

from __future__ import annotations

from kvview.errors import line_of
from kvview_reference.replay.run import ReplayReport

_SLOW = 1.25  # times the length of the trace
_SHORTEST_S = 60.0


def figures_of(report: ReplayReport, num_malformed: int) -> list[tuple[str, str, bool]]:
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
        fault("malformed rows", num_malformed),
        ("seconds", f"{report.seconds:.1f}", False),
        ("blocks per second", f"{report.blocks_per_s:,.0f}", False),
    ]


def explain(report: ReplayReport) -> list[str]:
    """Write sentences about the timing of requests, a tier without hits and failed transfers."""
    lines = _timing(report)
    if report.offloaded_blocks and not report.cpu_hit_blocks and not report.failed_transfers:
        lines.append(
            f"Nothing was hit on the {report.tier} tier, though {report.offloaded_blocks:,} "
            "blocks were offloaded. The tier may be too small to keep a block until its next use: "
            "make it larger ('kvview size' computes how much is worth it). Otherwise the GPU hits "
            "every block, no block is used again, or the connector does not find the blocks that "
            "it stored ('kvview check')."
        )
    if report.failed_transfers:
        lines.append(
            f"{report.failed_transfers:,} transfers failed. A replay injects no failures, so these "
            f"are the connector's own, first {line_of(report.first_failure)}. The blocks that "
            "failed to load were computed, so no token is wrong; check whether the failures are "
            "intended."
        )
    return lines


def _timing(report: ReplayReport) -> list[str]:
    if report.time is None:
        return [
            f"Closed loop: {report.closed_loop} requests at once, in the order of the trace; "
            "arrival times are ignored."
        ]
    model, seconds = report.time, report.simulated_seconds or 0.0
    speed = "" if model.speed == 1 else f" at {model.speed:g} times the speed"
    kv_bytes = f"{model.token_bytes:,} KV bytes per token"
    if model.group_bytes:
        kv_bytes = f"KV blocks of {' and '.join(f'{size:,}' for size in model.group_bytes)} bytes"
    lines = [
        f"Recorded arrival times{speed}: {model.prefill_tokens_per_s:,.0f} prompt tokens/s, "
        f"{model.decode_step_s:g} s per generated token, {model.load_gb_per_s:g} GB/s from the "
        f"host and {model.store_gb_per_s:g} GB/s to it, {kv_bytes}, "
        f"{model.step_tokens:,} prompt tokens per step, up to {model.max_running} requests at "
        "once.",
        f"Requests arrived for {report.trace_seconds:,.0f} s and were done after {seconds:,.0f} s. "
        f"They waited {report.mean_wait_s:,.1f} s on average (at most {report.max_wait_s:,.1f} s). "
        f"The link was busy {report.load_link_busy:.1%} of the time with loads, "
        f"{report.store_link_busy:.1%} with stores.",
    ]
    if seconds > _SLOW * max(report.trace_seconds or 0.0, _SHORTEST_S):
        lines.append(
            "One such engine is too slow for this trace, so order matters more than time; "
            "--prefill-rate and --speed change that."
        )
    return lines
