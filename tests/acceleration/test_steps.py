"""Kernels read weights past the calls of their modules only where these are at hand."""

import torch
from torch import nn

from surgery.acceleration.steps import readable


def test_weights_are_readable_where_the_query_is():
    norm, query = nn.LayerNorm(4), torch.zeros(1)
    assert readable(query, norm, None)
    assert not readable(query, norm, nn.LayerNorm(4, device="meta"))  # offloaded until it is called


def test_weights_inside_an_adapter_are_not():
    adapter = nn.Module()
    adapter.base_layer = nn.Linear(2, 2)
    assert not readable(torch.zeros(1), adapter)
