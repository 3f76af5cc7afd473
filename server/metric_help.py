"""One line for each metric that the engine's snapshot brings: what # HELP says of it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_TEXTS = {
    "sglang:prompt_tokens": "prompt tokens of admitted requests, cached ones included",
    "sglang:generation_tokens": "tokens generated",
    "sglang:cached_tokens": "prompt tokens found in the prefix cache",
    "sglang:num_requests": "requests that passed the engine's door",
    "sglang:num_aborted_requests": "requests ended by their client or an operator",
    "sglang:num_running_reqs": "requests in prefill or decode",
    "sglang:num_queue_reqs": "requests that wait to be admitted",
    "sglang:num_used_tokens": "KV slots held by requests",
    "sglang:token_usage": "share of the KV pool held by requests, 0 to 1",
    "sglang:gen_throughput": "tokens generated per second since the last snapshot",
    "sglang:cache_hit_rate": "share of prompt tokens found in the prefix cache since start",
    "sglang:max_total_num_tokens": "KV slots in all",
    "sglang:is_cuda_graph": "1 if decode steps have graphs to replay",
    "sglang:time_to_first_token_seconds": "from arrival at the engine to the first token",
    "sglang:inter_token_latency_seconds": "between two tokens of one request",
    "sglang:e2e_request_latency_seconds": "from arrival at the engine to the end",
    "sglang:queue_time_seconds": "from arrival at the engine to admission",
    "sglang:per_stage_req_latency_seconds": "time of a request in queue, prefill and decode",
    "sglang:cuda_graph_passes": "steps by phase, with a graph or with none",
    "sglang:graph_memory_usage_gb": "memory that the graphs of a phase took at capture, GiB",
    "sglang:startup_cuda_graph_time_seconds": "time that the captures of a phase took",
    "sglang:startup_time_seconds": "time of each stage of the engine's start",
    "sglang:weight_memory_usage_gb": "memory of the weights, GiB",
    "sglang:kv_cache_memory_usage_gb": "memory of the KV pool, GiB",
    "duograph_graph_replays": "replays of the graph of one captured size",
    "duograph_graph_real_tokens": "real rows (decode) or tokens (prefill) in replays",
    "duograph_graph_padded_tokens": "padding rows (decode) or tokens (prefill) in replays",
    "duograph_graph_eager": "steps that ran without a graph, by reason",
    "duograph_graph_capture_seconds": "time to capture one size",
    "duograph_graph_capture_bytes": "memory that capturing one size took",
    "duograph_graph_pool_bytes": "memory of the pool that all graphs share",
    "duograph_graph_recompiles": "traces of the model after start-up, each of them a bug",
    "duograph_graph_dropped_sizes": "sizes not captured for want of memory",
    "duograph_graph_batch_size": "actual rows (decode) or tokens (prefill) of steps",
    "duograph_requests_refused": "requests turned away at the engine's door",
    "duograph_requests_timed_out": "requests ended by a timeout",
    "duograph_request_faults": "requests ended by an exception of the engine",
    "duograph_messages_ignored": "messages with an id that is in use or of no frontend",
    "duograph_retractions": "running requests that gave their pages back for others",
    "duograph_evicted_pages": "pages taken out of the prefix cache",
    "duograph_wasted_rows": "rows computed for a request that had ended",
    "duograph_steps": "steps of the model by mode",
    "duograph_prefix_cache_pages": "pages in the prefix cache",
    "duograph_new_token_ratio": "share of max_tokens that a request is expected to write",
}
HELP: Mapping[str, str] = MappingProxyType(_TEXTS)
