"""Settings of ``surgery bench kernels``; free of torch imports."""

from __future__ import annotations

from dataclasses import dataclass

from surgery.common.file_settings import FileSettings
from surgery.common.setting import setting


@dataclass(frozen=True)
class KernelRequest(FileSettings):
    """Request for a kernel benchmark; options that are not set are None, lists are comma-separated."""

    operations: str | None = setting(
        None, "Operations to measure, comma-separated.", unset="all", section="Cases", metavar="NAMES"
    )
    shapes: str | None = setting(
        None, "Model shapes, comma-separated.", unset="llama2-7b,llama3-8b,qwen2.5-7b", metavar="NAMES"
    )
    contexts: str | None = setting(
        None, "Context lengths in tokens, comma-separated.", unset="8k,32k,128k", metavar="SIZES"
    )
    batches: str | None = setting(None, "Batch sizes, comma-separated.", unset="1,8,32", metavar="SIZES")
    dtype: str | None = setting(
        None, "bfloat16, float16 or float32.", unset="bfloat16; on a CPU float32", metavar="NAME"
    )
    baselines: bool = setting(True, "Measure PyTorch's kernels as well (SDPA).", section="Measuring")
    limit: float | None = setting(None, "Start no further case after this time.", unset="no limit", metavar="SECONDS")
    device: str = setting("auto", "Device: cpu, cuda, cuda:1 …; auto is cuda if available.", metavar="NAME")
