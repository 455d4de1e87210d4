"""Greedy generation by vLLM, run by the interpreter of its environment: a request in JSON, an answer in JSON.

    python run_vllm.py REQUEST ANSWER

The request holds the checkpoint (``model``), settings of ``vllm.LLM`` (``engine``), prompts as token ids (``prompts``;
each list of them is handed over at once, one list after another) and ``new_tokens``. The answer holds by list and
prompt the new tokens and their log-probabilities and the prompt's tokens that were found in the cache, the tokens
that the cache has room for, and how often a request was preempted.
"""

import json
import os
import sys

# One process: the answer can look into the scheduler.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def main(request_path: str, answer_path: str) -> None:
    from vllm import LLM, SamplingParams

    with open(request_path, encoding="utf-8") as file:
        request = json.load(file)
    llm = LLM(request["model"], disable_log_stats=False, **request["engine"])
    sampling = SamplingParams(temperature=0.0, max_tokens=request["new_tokens"], ignore_eos=True, logprobs=0)
    cache = llm.llm_engine.vllm_config.cache_config
    answer = {"rounds": [], "cached_tokens": cache.num_gpu_blocks * cache.block_size}
    for prompts in request["prompts"]:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        rows = [(list(output.outputs[0].token_ids), output.outputs[0].logprobs) for output in outputs]
        answer["rounds"].append(
            {
                "tokens": [tokens for tokens, _ in rows],
                "logprobs": [[s[t].logprob for t, s in zip(tokens, steps, strict=True)] for tokens, steps in rows],
                "found": [output.num_cached_tokens for output in outputs],
            }
        )
    answer["preemptions"] = next(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    with open(answer_path, "w", encoding="utf-8") as file:
        json.dump(answer, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
