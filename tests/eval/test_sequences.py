import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import surgery
from surgery.common.errors import SurgeryError
from surgery.eval.sequences import random_windows, tokenize

TEXT = list(range(100, 300))


@pytest.mark.parametrize("bos", [1, None])
def test_windows_are_bos_and_consecutive_text(bos):
    windows = random_windows(TEXT, count=5, length=16, seed=2, bos=bos)
    assert windows.shape == (5, 16) and windows.dtype == torch.int64
    assert (windows[:, 0] == 1).all() == (bos == 1)
    assert (windows[:, bos == 1 :].diff(dim=1) == 1).all()


def test_the_seed_decides():
    first = random_windows(TEXT, 8, 16, seed=0, bos=1)
    assert torch.equal(first, random_windows(np.array(TEXT), 8, 16, seed=0, bos=1))
    assert not torch.equal(first, random_windows(TEXT, 8, 16, seed=1, bos=1))


def test_published_sequences_do_not_change():
    # Python's own generator: these offsets are the evaluation set, and must never move.
    assert (random_windows(TEXT, 3, 16, seed=2, bos=None)[:, 0] - 100).tolist() == [14, 23, 21]
    assets = Path(surgery.__file__).parent / "assets"
    tokenizer = AutoTokenizer.from_pretrained(assets / "demo-model")
    text = tokenize(tokenizer, (assets / "heldout-stdlib.txt").read_text(encoding="utf-8"))
    windows = random_windows(text, count=24, length=1024, seed=2, bos=tokenizer.bos_token_id)
    assert hashlib.sha256(windows.numpy().astype("<i8").tobytes()).hexdigest()[:16] == "52d8f0ca01fc40d4"


@pytest.mark.parametrize(
    ("count", "length", "message"),
    [(1, 200, "too few for windows of 200"), (0, 16, "cannot draw 0 windows"), (1, 1, "of 1 tokens")],
)
def test_impossible_requests(count, length, message):
    with pytest.raises(SurgeryError, match=message):
        random_windows(TEXT, count, length, seed=0, bos=None)
