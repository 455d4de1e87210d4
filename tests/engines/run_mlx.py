"""Greedy generation by mlx-lm, run by the interpreter of its environment: a request in JSON, an answer in JSON.

    python run_mlx.py REQUEST ANSWER

The request holds the checkpoint (``model``), prompts as token ids (``prompts``) and ``new_tokens``. The answer holds by
prompt the new tokens and their log-probabilities, and of a token the numbers that the cache holds (``cached``, by
layer). What mlx-lm refuses is in ``error``.
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model


def main(request_path: str, answer_path: str) -> None:
    request = json.loads(Path(request_path).read_text())
    try:
        answer = generate(**request)
    except Exception as error:  # whatever it ends with is its answer
        answer = {"error": f"{type(error).__name__}: {error}"}
    Path(answer_path).write_text(json.dumps(answer))


def generate(model: str, prompts: list[list[int]], new_tokens: int) -> dict:
    loaded, _ = load_model(Path(model), strict=True)
    answer = {"tokens": [], "logprobs": [], "counts": []}
    for prompt in prompts:
        cache, inputs, tokens, logprobs = make_prompt_cache(loaded), prompt, [], []
        for _ in range(new_tokens):
            logits = loaded(mx.array([inputs]), cache=cache)[0, -1].astype(mx.float32)
            token = int(logits.argmax())
            logprobs.append(float(logits[token] - mx.logsumexp(logits)))
            tokens.append(token)
            inputs = [token]
        answer["tokens"].append(tokens)
        answer["logprobs"].append(logprobs)
        answer["counts"].append(len(tokens))
        answer["cached"] = [sum(part.shape[1] * part.shape[3] for part in (each.keys, each.values)) for each in cache]
    return answer


if __name__ == "__main__":
    main(*sys.argv[1:])
