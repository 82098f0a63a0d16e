"""The transfer worker between the GPU and host memory, in torch."""

from kvview_reference.transfer.worker import CPUGPUTransferWorker as CPUGPUTransferWorker
