"""``kvview doctor``, which reports whether kvview fits the installed vLLM."""

from kvview_vllm.doctor.diagnosis import (
    Diagnosis as Diagnosis,
    SeamReport as SeamReport,
    diagnose as diagnose,
)
