"""The mode under which tests run decode paths raises for what would make the host wait, and for nothing else."""

import numpy as np
import pytest
import torch
from no_host_sync import HostSyncError, NoHostSync

ROW, MASK, MATRIX = torch.arange(4), torch.tensor([True, False, True, False]), torch.randn(4, 3)


@pytest.mark.parametrize(
    "call",
    [
        lambda: ROW[0].item(),
        lambda: ROW.tolist(),
        lambda: int(ROW.max()),
        lambda: bool(MASK.any()),
        lambda: MATRIX[: ROW[1]],
        lambda: f"{ROW[0]}",
        lambda: 1 in ROW,
        lambda: MASK.nonzero(),
        lambda: torch.where(MASK),
        lambda: torch.arange(ROW.sum()),
        lambda: MATRIX[MASK],
        lambda: MATRIX[MASK.byte()],
        lambda: MATRIX.clone().index_put_((MASK,), MATRIX[:2]),
        lambda: MATRIX[:, 0].masked_select(MASK),
        lambda: ROW.unique(),
        lambda: ROW.repeat_interleave(ROW),
        lambda: torch.equal(ROW, ROW),
        lambda: torch.allclose(MATRIX, MATRIX),
        lambda: ROW.numpy(),
        lambda: np.asarray(ROW),
        lambda: ROW.cpu(),
        lambda: torch.tensor([1, 2]),
        lambda: torch.tensor(3.0),
        lambda: torch.as_tensor([1, 2]),
        lambda: torch.from_numpy(np.zeros(2)),
        lambda: MATRIX.new_tensor([1.0]),
        lambda: MATRIX[[0, 2]],
        lambda: ROW.to("meta"),
    ],
)
def test_calls_that_raise(call):
    with pytest.raises(HostSyncError), NoHostSync():
        call()
    assert ROW[0].item() == 0  # the mode ends with its block


def test_calls_that_pass():
    with NoHostSync():
        table = torch.arange(4, device=ROW.device) + ROW
        out = MATRIX[table % 4].clone()
        out[:, 0] = 1.0
        out[MASK] = 0.0
        out[ROW] = torch.where(MASK[:, None], out, MATRIX).masked_fill(MATRIX > 0, -torch.inf)
        out = out.repeat_interleave(2, 0).index_select(0, ROW).softmax(-1).to(torch.bfloat16)
    assert out.shape == (4, 3)
