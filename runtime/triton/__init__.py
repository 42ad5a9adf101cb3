"""Triton Inference Server: the model repository of an engine, and a server for the CPU."""
