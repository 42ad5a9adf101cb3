"""The bytes of weights that a decode step reads."""

from __future__ import annotations

import numpy as np
import onnx

from kvsift.builder.package import GRAPH
from kvsift.runtime.engine import Engine


def weight_bytes(engine: Engine) -> int:
    """Return the bytes of weights that a decode step reads.

    Every initializer but those that are only looked up by row (the embedding, unless it is tied
    to a float head, which then counts once).
    """
    model = onnx.load(str(engine.directory / GRAPH), load_external_data=False)
    read = {
        name
        for node in model.graph.node
        for name in node.input
        if node.op_type != "Gather" or name in node.input[1:]
    }
    return sum(
        int(np.prod(tensor.dims, dtype=np.int64))
        * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        for tensor in model.graph.initializer
        if tensor.name in read
    )
