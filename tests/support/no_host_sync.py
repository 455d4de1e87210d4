"""A mode in which operators that make the host wait for a GPU raise, wherever tensors really are."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

WAITING = {
    aten._local_scalar_dense.default,  # item, float, bool, tolist of one number
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
}
INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}


class HostSync(AssertionError):
    """The host would wait for the device here."""


class NoHostSync(TorchDispatchMode):
    """Raise :class:`HostSync` at operators for whose result, or whose result's shape, a host waits.

    Copies between devices cannot be seen where all tensors are on a CPU. ``Tensor.tolist`` of several numbers is no
    operator, and is not seen either.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in WAITING:
            raise HostSync(f"{function} makes the host wait for the device")
        # Indices of booleans take their number from the device; put with a value of one number they do not.
        if function in INDEXING and any(isinstance(each, Tensor) and each.dtype == torch.bool for each in args[1]):
            single = len(args) > 2 and args[2].numel() == 1
            if not single:
                raise HostSync(f"{function} with a mask makes the host wait for the device")
        return function(*args, **(kwargs or {}))
