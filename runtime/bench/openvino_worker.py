"""A program for an environment with OpenVINO GenAI: one pipeline, one request per line.

`python openvino_worker.py MODEL.gguf THREADS KEPT PRECISION`, KEPT 0 for no eviction. Each line
of stdin is JSON, {"ids": [...], "output": n}; each line of stdout says how long it took. It needs
nothing of kvsift.
"""

from __future__ import annotations

import json
import sys
from typing import Any

#: OpenVINO's cache blocks on a CPU, tokens; eviction counts in them.
BLOCK = 32
#: The queries that vote, as many as kvpress' SnapKV and ours take.
WINDOW = 64


def pipeline(genai: Any, model: str, threads: int, kept: int, precision: str) -> Any:
    """Return a pipeline that holds about `kept` tokens: one block of sinks, two of recent ones."""
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = 16384
    if kept:
        scheduler.use_cache_eviction = True
        scheduler.cache_eviction_config = genai.CacheEvictionConfig(
            start_size=BLOCK,
            recent_size=2 * BLOCK,
            max_cache_size=kept // BLOCK * BLOCK,
            aggregation_mode=genai.AggregationMode.SUM,
            snapkv_window_size=WINDOW,
        )
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
    if precision == "f32":
        properties |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    return genai.LLMPipeline(model, "CPU", scheduler_config=scheduler, **properties)


def main() -> None:
    """Load the pipeline, then answer lines until stdin ends."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    model, threads, kept, precision = sys.argv[1:5]
    pipe = pipeline(genai, model, int(threads), int(kept), precision)
    print(json.dumps({"ready": genai.get_version()}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        config = genai.GenerationConfig()
        config.max_new_tokens = asked["output"]
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        ids = openvino.Tensor(np.array([asked["ids"]], np.int64))
        metrics = pipe.generate(ids, config).perf_metrics
        steps = list(metrics.raw_metrics.m_durations)[1 - asked["output"] :]
        answer = {
            "ttft_s": metrics.get_ttft().mean / 1e3,
            "itl_s": [s / 1e6 for s in steps] or [metrics.get_tpot().mean / 1e3],
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
