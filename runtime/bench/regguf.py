"""A GGUF file again in another precision, for peers that read GGUF: everything else is copied."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

#: GGUF's name of our weight precisions; int8 is blocks of 32 with a scale each, as ours are.
TYPES = {"fp16": gguf.GGMLQuantizationType.F16, "int8": gguf.GGMLQuantizationType.Q8_0}
#: Written by the writer itself.
OWN = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture")


def rewrite(source: Path, target: Path, weights: str) -> Path:
    """Write `source` with all its matrices as `weights` (fp16 or int8) and return `target`."""
    reader = gguf.GGUFReader(str(source))
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(str(target), architecture)
    for name, field in reader.fields.items():
        if name not in OWN:
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub_type=inner)
    for tensor in reader.tensors:
        data = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if len(tensor.shape) > 1:
            writer.add_tensor(tensor.name, gguf.quantize(data, TYPES[weights]),
                              raw_dtype=TYPES[weights])  # fmt: skip
        else:
            writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
