"""Model Runner V2 on a CPU: Triton's interpreter runs the kernels of the runner.

Source: vllm/triton_utils/importing.py, vllm/v1/worker/cpu_worker.py, 0.32.0.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from types import SimpleNamespace
from typing import Any

from kvview_vllm.releases.compat.calls import cpus_have_runner_v2
from kvview_vllm.releases.compat.versions import vllm

_TRITON_NAMES = {"HAS_TRITON", "tl", "tldevice", "triton"}


class _Driver:
    """The driver of a GPU that does not exist; the interpreter runs each kernel in Python."""

    @classmethod
    def is_active(cls) -> bool:
        """Whether this is the driver of the process."""
        return True

    def get_current_device(self) -> int:
        """Return the number of the device."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """Return the number of the stream."""
        return 0

    def get_current_target(self) -> Any:
        """Return the target of a compilation."""
        compiler: Any = importlib.import_module("triton.backends.compiler")
        return compiler.GPUTarget("cpu", 0, 32)

    def get_active_torch_device(self) -> Any:
        """Return the device of the tensors."""
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """Return the module of torch for the device."""
        import torch

        return torch.cpu


def why_no_runner_v2() -> str:
    """Return the reason why Model Runner V2 cannot run here; empty if it can."""
    if not cpus_have_runner_v2():
        return "this release has no Model Runner V2 for a CPU"
    if importlib.util.find_spec("triton") is None:
        return "it needs triton, which is not installed"
    return ""


def use_runner(is_v2: bool) -> None:
    """Choose the model runner of this process, which has not started an engine yet.

    Triton may have been imported without its interpreter, and vLLM without Triton, because the CPU
    build disables it. So this function imports Triton and vLLM's names of Triton again, before the
    modules of Model Runner V2 are imported.

    Args:
        is_v2: Whether to choose V2; otherwise V1.
    """
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(is_v2))
    if not is_v2:
        return
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton's own functions are defined
    for name in [*sys.modules]:
        if name.split(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]
    backends: Any = importlib.import_module("triton.backends").backends
    backends.clear()
    backends["cpu"] = SimpleNamespace(compiler=object, driver=_Driver)
    runtime: Any = importlib.import_module("triton.runtime")
    runtime.driver.set_active(_Driver())
    importlib.reload(vllm("triton_utils.importing"))
    names = vars(importlib.reload(vllm("triton_utils")))
    for module in [module for name, module in sys.modules.items() if name.startswith("vllm.")]:
        for name in _TRITON_NAMES & vars(module).keys():
            setattr(module, name, names[name])
