"""Makes arrays where a given one lies: numpy on the host, torch on its device."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Arrays:
    """Memory beside `like`, a torch tensor or a numpy array (the kernels compiled for the CPU)."""

    def __init__(self, like: Any) -> None:
        self._like = like
        # Whoever hands over a tensor has imported torch.
        self._torch: Any = sys.modules["torch"] if hasattr(like, "data_ptr") else None

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Return memory that nobody has written, `dtype` by numpy's name."""
        if self._torch is None:
            return np.empty(shape, dtype)
        return self._like.new_empty(shape, dtype=getattr(self._torch, dtype))

    def put(self, values: NDArray[Any]) -> Any:
        """Return a copy of host values."""
        if self._torch is None:
            return values
        return self._torch.from_numpy(values).to(self._like.device)

    def contiguous(self, array: Any) -> Any:
        """Return the array in row-major order, itself if it is."""
        return np.ascontiguousarray(array) if self._torch is None else array.contiguous()

    def stream(self) -> int:
        """Return the CUDA stream on which torch works now; 0 on the host."""
        if self._torch is None or not self._like.is_cuda:
            return 0
        return int(self._torch.cuda.current_stream(self._like.device).cuda_stream)
