"""Evaluation of eviction policies: fidelity to the full cache, and needles in a haystack.

`python -m kvsift.runtime.evaluation --help`. Each text is read once into a dense cache; every
variant then evicts from a copy of it, through the nodes that its engine would have.
"""
