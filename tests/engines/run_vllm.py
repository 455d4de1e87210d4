"""Greedy generation by vLLM, run by the interpreter of its environment: a request in JSON, an answer in JSON.

    python run_vllm.py REQUEST ANSWER

The request holds by name what is run, one after another: the checkpoint (``model``), settings of ``vllm.LLM``
(``engine``), rounds of prompts as token ids (``rounds``; the prompts of a round are handed over at once) and
``new_tokens``. The answer holds by name and round the new tokens, their log-probabilities and the prompt's tokens that
were found in the cache; also, the tokens that the cache has room for, how often a request was preempted, and the
calls of every method of the plugin's attention (``watched``), where a wait for a device is an error, and the
``cudagraph_mode`` that vLLM would choose on CUDA. Where vLLM gave up it holds the ``error`` instead.
"""

import gc
import json
import os
import sys
import traceback
from unittest.mock import patch

# One process: an error is seen where it is raised, and the second model starts in seconds.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# The sampler's few compiled functions take longer to compile than all of this takes to run.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

COMMON = {"dtype": "float32", "enforce_eager": True, "block_size": 16, "max_model_len": 256, "disable_log_stats": False}


def run(request: dict, watched: dict[str, int]) -> dict:
    from vllm import LLM, SamplingParams

    watched.clear()
    llm = LLM(request["model"], **{**COMMON, **request["engine"]})
    sampling = SamplingParams(temperature=0.0, max_tokens=request["new_tokens"], ignore_eos=True, logprobs=0)
    cache = llm.llm_engine.vllm_config.cache_config
    answer = {"rounds": [], "cached_tokens": cache.num_gpu_blocks * cache.block_size, "blocks": cache.num_gpu_blocks}
    answer["tokens_of_longest"] = cache.kv_cache_size_tokens  # in requests of max_model_len, by all groups
    before = preemptions(llm)
    for prompts in request["rounds"]:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        rows = [(list(output.outputs[0].token_ids), output.outputs[0].logprobs) for output in outputs]
        answer["rounds"].append(
            {
                "tokens": [tokens for tokens, _ in rows],
                "logprobs": [[s[t].logprob for t, s in zip(tokens, steps, strict=True)] for tokens, steps in rows],
                "found": [output.num_cached_tokens for output in outputs],
            }
        )
    answer["cudagraph_mode"] = cudagraph_mode(llm.llm_engine.vllm_config)
    return {**answer, "preemptions": preemptions(llm) - before, "watched": dict(watched)}


def cudagraph_mode(vllm_config) -> str:
    """Return the CUDA graph mode that vLLM would take with the plugin's steps, were this CUDA and kernels there."""
    from vllm.config import CompilationConfig, CUDAGraphMode

    from surgery_vllm.steps import StepBuilder

    on_cuda = patch.object(vllm_config.device_config, "device", "cuda")
    with on_cuda, patch("surgery_vllm.steps.refusal_of_kernels", return_value=None):
        support = StepBuilder.get_cudagraph_support(vllm_config, None)
    config = CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    return config.resolve_cudagraph_mode_and_sizes(support, "StepBackend").name


def preemptions(llm) -> int:
    """So far, of all engines of this process: the counter is Prometheus'."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")


def main(request_path: str, answer_path: str) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory
    from watched_attention import watch

    with open(request_path, encoding="utf-8") as file:
        requests = json.load(file)
    answers, watched = {}, watch()
    for name, request in requests.items():
        try:
            answers[name] = run(request, watched)
        except Exception as error:
            traceback.print_exc()
            answers[name] = {"error": str(error)}
        gc.collect()
        cleanup_dist_env_and_memory()
    with open(answer_path, "w", encoding="utf-8") as file:
        json.dump(answers, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
