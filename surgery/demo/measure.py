"""Measures checkpoints with stock transformers, as the demo's proof: run by path in a process of its own.

Nothing of this package can be imported here (the name is blocked), so whatever loads is loaded by transformers alone.
Called as ``python -I demo_measure.py REQUEST.json``; prints one JSON object a checkpoint, in the order of the request.
The definitions are those of surgery.eval: loss in nats per predicted token, the share of prompts whose five digits are
all right, and bytes by which the live cache grows per decoded token.
"""

import json
import sys

sys.modules["surgery"] = None  # an import of the package is an ImportError from here on

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from transformers.utils import logging  # noqa: E402

BATCH = 4
CACHE_PROMPT, CACHE_STEPS = 64, 8


def logits_of(model, tokens):
    return model(input_ids=tokens, use_cache=False).logits.float()


def loss(model, windows):
    """Mean cross-entropy of all tokens but the first of each window [N, T]."""
    total = 0.0
    for batch in windows.split(BATCH):
        logits = logits_of(model, batch)[:, :-1].flatten(0, 1)
        total += torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten(), reduction="sum").item()
    return total / windows[:, 1:].numel()


def recall(model, prompts, answers):
    """Share of prompts [N, T] whose every answer token (bool mask [N, T]) is the most likely one."""
    right = 0
    for batch, answer_mask in zip(prompts.split(BATCH), answers.split(BATCH), strict=True):
        guess = logits_of(model, batch)[:, :-1].argmax(-1)
        right += int(((guess == batch[:, 1:]) | ~answer_mask[:, 1:]).all(1).sum())
    return right / len(prompts)


def kv_bytes_per_token(model, window):
    """Growth of the cache that transformers makes by itself, over a few decoded tokens of a window [T]."""

    def size(cache):
        return sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))

    output = model(input_ids=window[None, :CACHE_PROMPT], use_cache=True)
    name = "cache" if "cache" in output else "past_key_values"  # until transformers 5.24
    cache = output[name]
    before = size(cache)
    for position in range(CACHE_PROMPT, CACHE_PROMPT + CACHE_STEPS):
        model(input_ids=window[None, position : position + 1], use_cache=True, **{name: cache})
    return (size(cache) - before) / CACHE_STEPS


def completion(model, tokenizer, prompt, new_tokens):
    """The greedy continuation of a prompt's tokens as text, without the prompt."""
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
    # In its own dtype first: that is what a cache is made of. Then in float32, where CPUs are fast and exact.
    # The code next to the weights is what the conversion has just written.
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", local_files_only=True, trust_remote_code=True)
    model = model.eval()
    module = type(model).__module__
    if not module.startswith(("transformers.models.", "transformers_modules.")):
        raise SystemExit(f"{path}: loads as {module}.{type(model).__name__}, neither of transformers nor of its folder")
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=True)
    # Token by token there is not work enough for two cores; waiting for each other would cost more than it brings.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    cached = kv_bytes_per_token(model, tokens["windows"][0])
    model = model.float()
    text = completion(model, tokenizer, prompt, new_tokens)
    torch.set_num_threads(threads)
    return {
        "class": type(model).__name__,
        "kv_bytes_per_token": cached,
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
