"""Greedy generation by llama.cpp, run by the interpreter of its environment: a request in JSON, an answer in JSON.

    python run_llama_cpp.py REQUEST ANSWER

The request holds the GGUF (``model``), each prompt as text or as token ids (``prompts``), ``new_tokens``, the
``context``, the cache's type (``cache``, "f32" or "f16"), whether attention is flash (``flash``), and token ids whose
losses are asked for (``text``, with the size of the ``vocabulary``), if any. The answer holds by prompt the new tokens,
their log-probabilities, how many were generated and how many tokens the prompt has; and the negative log-probability of
each token of the text but the first.
"""

import json
import sys

import xllamacpp


def main(request_path: str, answer_path: str) -> None:
    with open(request_path, encoding="utf-8") as file:
        request = json.load(file)
    params = xllamacpp.CommonParams()
    params.model.path = request["model"]
    params.n_ctx, params.n_parallel, params.warmup = request["context"], 1, False
    params.n_gpu_layers, params.cpuparams.n_threads, params.cpuparams_batch.n_threads = 0, 1, 1
    if not request.get("flash"):
        # It rounds on the CPU: 5e-3 in log-probabilities of float32 weights.
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    kind = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{request['cache'].upper()}")
    params.cache_type_k = params.cache_type_v = kind
    server = xllamacpp.Server(params)
    answer = {"tokens": [], "logprobs": [], "prompt_tokens": [], "counts": []}
    for prompt in request["prompts"]:
        settings = {"n_predict": request["new_tokens"], "temperature": 0.0, "n_probs": 1, "cache_prompt": False}
        message = server.handle_completions({**settings, "prompt": prompt, "ignore_eos": True})
        steps = message["choices"][0]["logprobs"]["content"]
        answer["tokens"].append([step["id"] for step in steps])
        answer["logprobs"].append([step["logprob"] for step in steps])
        answer["prompt_tokens"].append(message["usage"]["prompt_tokens"])
        answer["counts"].append(message["usage"]["completion_tokens"])
    answer["losses"] = losses(server, request.get("text", []), request.get("vocabulary"))
    with open(answer_path, "w", encoding="utf-8") as file:
        json.dump(answer, file)


def losses(server: xllamacpp.Server, text: list[int], vocabulary: int) -> list[float | None]:
    """Return the loss of every token but the first, given those before it, which the cache holds from one request to
    the next."""
    results = []
    for position in range(1, len(text)):
        settings = {"n_predict": 1, "temperature": 0.0, "n_probs": vocabulary, "cache_prompt": True}
        message = server.handle_completions({**settings, "prompt": text[:position], "ignore_eos": False})
        steps = (message["choices"][0].get("logprobs") or {}).get("content")
        if not steps:
            results.append(None)  # what it would have written ends within a character, of which it says nothing
            continue
        (step,) = steps
        (found_here,) = (each["logprob"] for each in step["top_logprobs"] if each["id"] == text[position])
        results.append(-found_here)
    return results


if __name__ == "__main__":
    main(*sys.argv[1:])
