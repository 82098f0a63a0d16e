"""``kvview doctor``: which vLLM is installed, and which of its seams fit."""

from kvview_vllm.doctor.diagnosis import Diagnosis, SeamReport, diagnose, diagnose_tier

__all__ = ["Diagnosis", "SeamReport", "diagnose", "diagnose_tier"]
