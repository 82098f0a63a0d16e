"""``kvview doctor``: the installed vLLM, and the seams that fit it."""

from kvview_vllm.doctor.diagnosis import Diagnosis, SeamReport, diagnose, diagnose_tier

__all__ = ["Diagnosis", "SeamReport", "diagnose", "diagnose_tier"]
