"""Parts of a row merged: exactly what one pass over all tokens gives."""

import pytest
import torch
from kernel_checks import assert_close
from kernel_examples import Compiled, slow

from surgery.kernels.split_kv import MOST_SPLITS, merge, merge_launch, split_count

torch.manual_seed(0)


def parts_of(logits, values, splits):
    """Means and logs of `splits` pieces of tokens: logits [N, S], values [N, S, D]; fewer tokens leave empty pieces."""
    pieces = zip(logits.tensor_split(splits, dim=1), values.tensor_split(splits, dim=1), strict=True)
    means, logs = [], []
    for logit, value in pieces:
        logs.append(logit.logsumexp(-1))
        means.append((logit.softmax(-1).unsqueeze(-1) * value).sum(-2))
    return torch.stack(means, 1), torch.stack(logs, 1)


@pytest.mark.parametrize("splits", [1, 3, 8])
def test_the_reference_is_one_softmax(splits):
    logits, values = torch.randn(5, 7, dtype=torch.float64) * 4, torch.randn(5, 7, 6, dtype=torch.float64)
    out, log = merge(*parts_of(logits, values, splits))
    torch.testing.assert_close(out, (logits.softmax(-1).unsqueeze(-1) * values).sum(-2), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(log, logits.logsumexp(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("splits", "width"), [(1, 16), (3, 48), (5, 320), (33, 7)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_kernel_is_the_reference(splits, width, dtype, device):
    parts, logs = torch.randn(4, splits, width, device=device), torch.randn(4, splits, device=device) * 20
    logs[0], parts[0] = -torch.inf, 0  # nothing to see
    logs[1, : splits // 2], parts[1, : splits // 2] = -torch.inf, 0
    out, log = torch.empty(4, width, dtype=dtype, device=device), torch.empty(4, device=device)
    merge_launch(parts, logs, out, log).run()
    expected, expected_log = merge(parts.double(), logs.double())
    assert_close("out", out, expected)
    assert_close("log", log, expected_log)
    again = torch.empty_like(out)
    merge_launch(parts, logs, again, log).run()
    assert torch.equal(out, again)


def test_splits_follow_from_shapes():
    assert split_count(programs=1, tokens=131_072, processors=132) == MOST_SPLITS
    assert split_count(programs=1, tokens=2048, processors=132) == 4
    assert split_count(programs=64, tokens=131_072, processors=132) == 4
    assert split_count(programs=1000, tokens=131_072, processors=132) == 1
    assert split_count(programs=1, tokens=100, processors=132) == 1


def none(name, capability, mma):
    return not mma


COMPILED = [slow(Compiled("compile_split_kv:launches", none))]
