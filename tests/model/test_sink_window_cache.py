"""The cache of sinks and a window, against keys of all tokens."""

import pytest
import torch

from surgery.eval.kv_cache import cache_bytes
from surgery.model.left_padding import LeftPadding
from surgery.model.sink_window_cache import SinkWindowCache, SinkWindowLayer

CPU = torch.device("cpu")
PADDINGS = [0, 3, 11]
TOKENS = 40


def chunks(sizes):
    first = 0
    for size in sizes:
        yield first, first + size
        first += size


@pytest.mark.parametrize("sizes", [[40], [1] * 40, [7, 1, 1, 20, 11], [2, 38], [13, 13, 14]])
@pytest.mark.parametrize(("sinks", "recent"), [(4, 8), (0, 8), (4, 1), (0, 1), (2, 30), (8, 4), (50, 50), (0, 40)])
def test_a_query_sees_exactly_the_tokens_of_the_definition(sinks, recent, sizes):
    """Each key is its own position in the row, so that what the mask shows can be read off."""
    positions = torch.arange(1.0, TOKENS + 1).view(1, 1, -1, 1).expand(len(PADDINGS), 2, -1, 3)
    layer = SinkWindowLayer(sinks, recent)
    layer.padding = LeftPadding(PADDINGS)
    for first, last in chunks(sizes):
        visible = layer.visible(last - first, CPU)
        keys, values = layer.update(positions[:, :, first:last], -positions[:, :, first:last])
        assert visible.shape == (3, 1, last - first, keys.shape[2])
        assert torch.equal(keys, -values)
        for row, padding in enumerate(PADDINGS):
            for query in range(first, last):
                output = keys[row, 0, visible[row, 0, query - first], 0].tolist()
                expected = [
                    key + 1.0 for key in range(padding, query + 1) if query - key < recent or key - padding < sinks
                ] or [query + 1.0]
                assert sorted(output) == expected
        assert layer.get_seq_length() == last
        assert layer.keys.shape[2] == min(last, recent - 1)


def test_reset_crop_and_a_mask_of_transformers():
    cache = SinkWindowCache(3, 6, layers=1)
    keys = torch.randn(2, 2, 20, 4)
    cache.update(keys, keys, 0)
    with pytest.raises(ValueError, match="mask"):
        cache.get_mask_sizes(1, 0)
    with pytest.raises(ValueError, match="assisted"):
        cache.crop(-1)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache_bytes(cache) == 0 and cache.layers[0].padding is None


@pytest.mark.parametrize("arguments", [(-1, 4), (4, 0)])
def test_impossible_settings_are_refused(arguments):
    with pytest.raises(ValueError):
        SinkWindowCache(*arguments, layers=1)
