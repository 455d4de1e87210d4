"""A whole evaluation report of made-up numbers: every task, every kind of row, and text that wants to break out."""

import math
import random

LENGTHS, DEPTHS, LIMIT = [512, 1024, 2048, 3072], [0, 25, 50, 75, 100], 2048
SOURCES = ("selectors", "statistics", "tarfile")
HOSTILE = "</script><img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
WEIGHTS = 11_094_528
BASELINE_BYTES = 3072.0

# The first three are one of each kind.
# Name, role, variant, KV ratio, how much worse the row is in nats, rank of the latent or None.
ROWS = (
    ("gqa", "baseline", None, 1.0, 0.0, None),
    ("mla-1/2", "checkpoint", None, 0.5, 0.021, 96),
    ("gqa int4 KV", "variant", {"kind": "quantized-kv", "bits": 4, "group": 32}, 0.3125, 0.031, None),
    ("gqa int8 KV", "variant", {"kind": "quantized-kv", "bits": 8, "group": 32}, 0.5625, 0.0004, None),
    ("gqa mean-pool 2", "variant", {"kind": "mean-pool", "kv_heads": 2}, 0.5, 1.9, None),
    ("gqa window 16+240", "variant", {"kind": "sink-window", "sinks": 16, "recent": 240}, 0.25, 0.19, None),
    ("mla-1/4", "checkpoint", None, 0.25, 0.087, 48),
    ("mla-1/4 healed", "checkpoint", None, 0.25, 0.028, 48),
)


def sample_report(*, limit: int | None = None, rows: int = len(ROWS)) -> dict:
    """The report, rebuilt at every call so that a test may change it; its first `rows` rows."""
    rng = random.Random(0)
    return {
        "schema": 1,
        "surgery_version": "0.1.0",
        "created": "2026-11-20T20:00:00Z",
        "command": "surgery eval mla-2 mla-4 mla-4-healed --baseline gqa --variants int8,int4,pool2,window",
        "title": "demo model: MLA at a half and a quarter",
        "settings": {"seed": 0, "limit": limit, "batch_size": 8, "dtype": "float32", "device": "cpu", "context": 1024},
        "environment": {
            "python": "3.11.9",
            "torch": "2.13.0",
            "transformers": "5.23.0",
            "platform": "Linux-6.1-x86_64",
            "device_name": "Intel Xeon",
            "processes": 1,
            "threads": 2,
        },
        "tokenizer": {"sha256": "5f" * 32},
        "tasks": {
            "loss": {"sequences": 24, "length": 1024, "data": {"name": "heldout-stdlib.txt", "sha256": "ab" * 32}},
            "recall": {"prompts": 48, "length": 1024, "facts": 4},
            "needle": {"lengths": LENGTHS, "depths": DEPTHS, "trials": 4, "domain": "code"},
            "generate": {"new_tokens": 64},
            "speed": {"contexts": [512, 2048], "batches": [1, 8], "new_tokens": 32},
            "lm-eval:python_names": {"num_fewshot": 0},
        },
        "baseline": "gqa",
        "rows": [_row(rng, *row) for row in ROWS[:rows]],
    }


def _row(rng: random.Random, name: str, role: str, variant: dict | None, ratio: float, worse: float, rank) -> dict:
    growth = 0.0 if variant and variant["kind"] == "sink-window" else BASELINE_BYTES * ratio
    conversion = _conversion(rng, name, rank) if rank else None
    return {
        "name": name,
        "role": role,
        "path": f"/models/{'gqa' if variant else name}",
        "sha256": "c0ffee" * 10 + "0000",
        "class": "DeepseekV3ForCausalLM" if rank else "LlamaForCausalLM",
        "dtype": "bfloat16",
        "variant": variant,
        "kv": {
            "context": 1024,
            "held_bytes": round(BASELINE_BYTES * ratio * 1024),
            "bytes_per_token": BASELINE_BYTES * ratio,
            "growth_per_token": growth,
            "ratio": ratio,
        },
        "conversion": conversion,
        "results": _results(rng, ratio, worse, growth, converted=bool(rank), baseline=role == "baseline"),
        "comparison": None if role == "baseline" else _comparison(worse),
        "seconds": {"loss": 12.3, "recall": 8.1, "needle": 60.2, "speed": 30.0},
    }


def _results(rng: random.Random, ratio: float, worse: float, growth: float, *, converted: bool, baseline: bool) -> dict:
    loss = 2.2785 + worse
    entries = math.exp(-3 * worse)
    needle = [[_rate(rng, entries - 0.5 * (n > LIMIT) - 0.1 * (d in (25, 50))) for d in DEPTHS] for n in LENGTHS]
    edges = [1, 129, 257, 385, 513, 641, 769, 897]
    return {
        "loss": {
            "tokens": 24_552,
            "sequences": 24,
            "length": 1024,
            "loss": loss,
            "perplexity": math.exp(loss),
            "bits_per_byte": loss / 2.07,
            "per_sequence": [loss + rng.gauss(0, 0.3) for _ in range(24)],
            "by_source": {
                source: {"loss": loss + rng.uniform(-0.2, 0.2), "tokens": 8184, "bits_per_byte": loss / 2.07}
                for source in SOURCES
            },
            "by_position": [
                {"start": s, "end": s + 127, "loss": loss + 0.8 / (1 + i) + worse * i / 20, "tokens": 3048}
                for i, s in enumerate(edges)
            ],
            "cached": {
                "loss": loss + 1,
                "prefill": 896,
                "decoded": 128,
                "decoded_loss": loss + 1e-6,
                "largest_difference": 1.1e-5,
                "per_sequence": [loss] * 24,
            },
            "divergence": None
            if baseline
            else {
                "kl": worse / 3,
                "top1_agreement": 0.5 + 0.5 * entries,
                "kl_per_sequence": [worse / 3] * 24,
                "agreement_per_sequence": [0.9] * 24,
            },
        },
        "recall": {"accuracy": round(48 * 0.9 * entries) / 48, "prompts": 48, "length": 1024, "hits": [1, 0] * 24},
        "needle": {
            "lengths": LENGTHS,
            "depths": DEPTHS,
            "trials": 4,
            "grid": needle,
            "accuracy": sum(map(sum, needle)) / 20,
            "hits": [1] * 80,
            "limit": LIMIT,
            "beyond_limit": [3072],
        },
        "generate": {
            "completions": [
                {"prompt": "def read(path):\n", "text": '    """Reads a file."""\n    with open(path) as file:\n'},
                {"prompt": "class Queue:\n", "text": f"    # {HOSTILE}\n    def __init__(self):\n        pass\n"},
            ],
            "new_tokens": 64,
        },
        "speed": {
            "dtype": "bfloat16",
            "device": "cpu",
            "threads": 2,
            "repeats": 3,
            "points": [_speed(rng, n, batch, ratio, converted) for batch in (1, 8) for n in (512, 1024, 2048)],
        },
        "lm-eval:python_names": {
            "metrics": {"acc": {"value": 0.41 - worse / 9, "stderr": 0.049}},
            "n_samples": 100,
            "n_shot": 0,
            "versions": {"python_names": 1.0},
            "lm_eval": "0.4.13",
        },
    }


def _speed(rng: random.Random, context: int, batch: int, ratio: float, converted: bool) -> dict:
    fastest = 1.1e10 / (WEIGHTS + batch * context * BASELINE_BYTES * ratio) * batch
    decode = fastest * rng.uniform(0.15, 0.2) * (0.5 if converted else 1)
    return {
        "context": context,
        "batch": batch,
        "prefill_tokens_per_second": 5000.0 - context / 2,
        "decode_tokens_per_second": decode,
        "prefill_seconds": [context * batch / 5000.0] * 3,
        "decode_seconds": [32 * batch / decode] * 3,
    }


def _conversion(rng: random.Random, name: str, rank: int) -> dict:
    healed = {"wandb": {"entity": "lab", "project": "healing", "run_id": "abc123"}}
    return {
        "to": "mla",
        "method": "fisher",
        "command": f"surgery convert gqa --to mla --kv-lora-rank {rank} --out {name}",
        "seconds": 113.2,
        "peak_memory_bytes": 1_100_000_000,
        "layers": [
            {
                "layer": layer,
                "rank": rank + rng.choice((-8, 0, 8)),
                "measured": {
                    "rope": 0.002 * (1 + layer) * rng.uniform(0.5, 2),
                    "latent": 2 / rank * rng.uniform(0.5, 2),
                },
                "latent_error_share": 0.5 / rank * rng.uniform(0.5, 2),
            }
            for layer in range(6)
        ],
        "healing": healed if "healed" in name else None,
    }


def _comparison(worse: float) -> dict:
    def interval(difference: float, width: float) -> dict:
        return {"difference": difference, "low": difference - width, "high": difference + width}

    loss_increase = -0.85 * (1 - math.exp(-3 * worse))
    width = 0.0002 + worse / 8
    return {
        "loss": interval(worse, width),
        "decoded_loss": interval(worse, width),
        "recall": interval(loss_increase, 0.04),
        "needle": interval(loss_increase, 0.03),
    }


def _rate(rng: random.Random, chance: float) -> float:
    """A share of four trials."""
    return sum(rng.random() < chance for _ in range(4)) / 4
