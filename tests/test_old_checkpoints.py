"""Checkpoints that earlier versions wrote, one of every kind: they load and generate what they did then.

Made by the commit before the structures moved into folders of their own, of random models of 128 tokens and four
layers, in bfloat16; `*-rows` by the version that settled packed rows. `old_checkpoints/tokens.json` holds what each
wrote greedily in float32.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import surgery  # noqa: F401  registers the custom model class with AutoModel

OLD = Path(__file__).with_name("old_checkpoints")
TOKENS = json.loads((OLD / "tokens.json").read_text())


@pytest.mark.parametrize("kind", sorted(TOKENS))
def test_a_checkpoint_of_an_earlier_version_writes_what_it_did(kind):
    model = AutoModelForCausalLM.from_pretrained(OLD / kind, dtype=torch.float32).eval()
    prompt = torch.arange(3, 43)[None] * 7 % 125 + 3
    tokens = model.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=2)
    assert tokens[0, prompt.shape[1] :].tolist() == TOKENS[kind]


def test_there_is_one_of_every_kind():
    assert sorted(path.name for path in OLD.iterdir() if path.is_dir()) == sorted(TOKENS) and len(TOKENS) >= 17
