"""Statistics of layers whose caches are packed."""

import pytest
import torch
from random_layers import random

from surgery.calibration.statistics import LayerStatistics


@pytest.fixture(scope="session")
def weighted_statistics():
    """Gives statistics of keys and values [tokens, n] whose tokens have weights, with a metric of random numbers."""

    def statistics_of(rows, normed=False):
        weights = torch.rand(len(rows), generator=torch.Generator().manual_seed(1)).add(0.5)
        weights /= weights.mean()
        moment, root = (rows * weights[:, None]).T @ rows / len(rows), random(24, 24, seed=2)
        metric, none = root @ root.T + torch.eye(24, dtype=torch.float64), torch.zeros(0)
        weighted = {"weighted_moment": moment, "weighted_mean": (rows * weights[:, None]).mean(0)}
        weighted |= {"token_weight": weights.float(), "weighted_gradient": metric}
        return LayerStatistics(
            moment, None, none, none, len(rows), **weighted, weighted_raw_gradient=metric if normed else None
        )

    return statistics_of
