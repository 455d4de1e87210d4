"""Measurement of checkpoints with stock transformers, for the demo; a script for a separate process.

The import of this package is blocked here, so transformers alone loads the checkpoints. Usage:
``python -I measure.py REQUEST.json``; prints one JSON object per checkpoint, in the order of the request. The metrics
are those of surgery.eval: loss in nats per predicted token, the share of prompts with all five digits correct, and the
growth of the live cache in bytes per decoded token. Decoded tokens per second are of one thread.
"""

import json
import statistics
import sys
import time

sys.modules["surgery"] = None  # importing the package raises ImportError from here on

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from transformers.utils import logging  # noqa: E402

BATCH = 1  # 15% faster than 4 for the stock MLA class on two cores
DECODED = 16


def logits_of(model, tokens):
    return model(input_ids=tokens, use_cache=False).logits.float()


def loss(model, windows):
    """Compute the mean cross-entropy over windows [N, T], without the first token of each."""
    total = 0.0
    for batch in windows.split(BATCH):
        logits = logits_of(model, batch)[:, :-1].flatten(0, 1)
        total += torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten(), reduction="sum").item()
    return total / windows[:, 1:].numel()


def recall(model, prompts, answers):
    """Compute the share of prompts [N, T] whose answer tokens (bool mask [N, T]) are all predicted greedily."""
    right = 0
    for batch, answer_mask in zip(prompts.split(BATCH), answers.split(BATCH), strict=True):
        guess = logits_of(model, batch)[:, :-1].argmax(-1)
        right += int(((guess == batch[:, 1:]) | ~answer_mask[:, 1:]).all(1).sum())
    return right / len(prompts)


def decode(model, window):
    """Decode the last ``DECODED`` tokens of a window [T] one by one with transformers' default cache.

    Returns the growth of the cache in bytes per token, and tokens per second by the median step.
    """

    def size(cache):
        return sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))

    prompt, seconds = len(window) - DECODED, []
    output = model(input_ids=window[None, :prompt], use_cache=True, logits_to_keep=1)
    name = "cache" if "cache" in output else "past_key_values"  # until transformers 5.24
    cache = output[name]
    before = size(cache)
    for position in range(prompt, len(window)):
        start = time.perf_counter()
        model(input_ids=window[None, position : position + 1], use_cache=True, **{name: cache})
        seconds.append(time.perf_counter() - start)
    return (size(cache) - before) / DECODED, 1 / statistics.median(seconds)


def completion(model, tokenizer, prompt, new_tokens):
    """Generate the greedy continuation of a prompt's tokens, as text without the prompt."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
    )
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


@torch.no_grad()
def measure(path, tokens, prompt, new_tokens):
    # The cache and its speed are measured in the model's own dtype, the rest in float32, fast and exact on CPUs.
    # Remote code is trusted: the conversion has just written it.
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", local_files_only=True, trust_remote_code=True)
    model = model.eval()
    module = type(model).__module__
    if not module.startswith(("transformers.models.", "transformers_modules.")):
        raise SystemExit(
            f"{path}: loads as {module}.{type(model).__name__}, a class neither of transformers nor of its folder"
        )
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=True)
    # Decoding has too little work per token for several threads.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    cached, speed = decode(model, tokens["windows"][0])
    model = model.float()
    text = completion(model, tokenizer, prompt, new_tokens)
    torch.set_num_threads(threads)
    return {
        "class": type(model).__name__,
        "kv_bytes_per_token": cached,
        "tokens_per_second": speed,
        "loss": loss(model, tokens["windows"]),
        "recall": recall(model, tokens["prompts"], tokens["answers"]),
        "completion": text,
    }


def main():
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    tokens = load_file(request["tokens"])
    for path in request["checkpoints"]:
        print(json.dumps(measure(path, tokens, request["prompt"], request["new_tokens"])), flush=True)


if __name__ == "__main__":
    main()
