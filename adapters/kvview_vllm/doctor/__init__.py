"""``kvview doctor``, which reports whether kvview fits the installed vLLM."""

from kvview_vllm.doctor.diagnosis import Diagnosis, SeamReport, diagnose, diagnose_tier

__all__ = ["Diagnosis", "SeamReport", "diagnose", "diagnose_tier"]
