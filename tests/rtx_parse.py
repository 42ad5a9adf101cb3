"""Parse an ONNX file with the parser of TensorRT for RTX; run by tests in a process of its own.

Usage: rtx_parse.py DIRECTORY_OF_THE_MODULE PLUGIN_LIBRARY ONNX_FILE. The parser creates the plugin
and then ends the process, since an engine for RTX cannot hold it; the log up to there is the proof.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import tensorrt_rtx_bindings as trt  # found in the directory just named


class Logger(trt.ILogger):  # type: ignore[misc,name-defined]
    """Prints everything at once: what was not flushed would be lost with the process."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)

    def log(self, severity: object, text: str) -> None:
        """Print one message."""
        print(text, flush=True)


def main() -> None:
    """Load the library, parse the file, say how it ended."""
    logger = Logger()
    assert trt.get_plugin_registry().load_library(sys.argv[2]) is not None
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    print("parsed", parser.parse(Path(sys.argv[3]).read_bytes()), flush=True)


main()
