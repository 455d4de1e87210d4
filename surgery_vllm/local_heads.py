"""Heads of one tensor-parallel process. Query heads are divided among processes; every process caches all latents."""

from dataclasses import dataclass

from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size


@dataclass(frozen=True)
class LocalHeads:
    """Query heads of this process, and the KV heads that they read.

    Attributes:
        queries: slice of the query heads.
        kv: slice of the KV heads; several processes have the same one if they are more than the KV heads.
    """

    queries: slice
    kv: slice

    @classmethod
    def of(cls, heads: int, kv_heads: int) -> "LocalHeads":
        """Return this process's share of a layer's heads.

        Raises:
            ValueError: the heads cannot be divided, or processes are to cache different tokens.
        """
        parallel = get_current_vllm_config().parallel_config
        if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
            raise ValueError("every process caches the latents of all tokens: leave context parallel sizes at 1")
        processes, sharing = get_tensor_model_parallel_world_size(), heads // kv_heads
        count = heads // processes
        if heads % processes or (count % sharing and sharing % count):
            raise ValueError(
                f"{heads} query heads of {kv_heads} KV heads cannot be divided among {processes} parallel processes"
            )
        first = count * get_tensor_model_parallel_rank()
        kv = slice(first // sharing, -(-(first + count) // sharing))
        return cls(slice(first, first + count), kv)

    @property
    def count(self) -> int:
        """Number of query heads."""
        return self.queries.stop - self.queries.start

    @property
    def kv_count(self) -> int:
        """Number of KV heads."""
        return self.kv.stop - self.kv.start

    def of_kv(self, tensor: Tensor, head_dim: int) -> Tensor:
        """Return the rows of this process's KV heads of a tensor [all KV heads · d, ...]."""
        return tensor[self.kv.start * head_dim : self.kv.stop * head_dim]
