"""kvsift: KV-cache eviction engines for ONNX Runtime and TensorRT."""

__version__ = "0.1.0"
