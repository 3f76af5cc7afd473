"""The rules that join several flags. Each failure is one sentence naming the flags involved;
a flag that cannot have an effect is pointed out, never dropped in silence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from duograph.kernels.attention import flashinfer_tools
from duograph.runners.config import GraphConfig, RunnerConfig
from duograph.server.args import ServeConfig
from duograph.server.options import UsageError

_LOOPBACK = ("127.", "::1", "localhost")


def check_together(config: ServeConfig) -> list[str]:
    """Lines to print as warnings. Raises UsageError for a combination that cannot be served."""
    _check_graph_sizes(config.runner, config.origins)
    _check_memory(config.runner)
    _check_attention(config.runner)
    http = config.http
    if not http.host.strip():
        raise UsageError("--host must not be empty; 127.0.0.1 serves this machine only")
    if any(not name.strip() for name in http.served_model_name):
        raise UsageError("--served-model-name must not be empty")
    if http.api_key is not None:
        check_key(http.api_key, "--api-key")
    if http.admin_api_key is not None:
        check_key(http.admin_api_key, "--admin-api-key")
    return [*_without_effect(config.runner.graph, config.origins), *_exposed(config)]


def check_key(key: str, origin: str) -> str:
    """The key itself. Raises UsageError if it cannot travel in an Authorization header; the
    message never holds the key."""
    if not key or any(not 33 <= ord(character) <= 126 for character in key):
        raise UsageError(f"{origin} must be printable ASCII without spaces, and not empty")
    return key


def _check_attention(runner: RunnerConfig) -> None:
    phases = {
        "--prefill-attention-backend": runner.prefill_attention_backend,
        "--decode-attention-backend": runner.decode_attention_backend,
    }
    if None in phases.values():  # otherwise nobody asks the flag of both
        phases["--attention-backend"] = runner.attention_backend
    for flag, name in phases.items():
        if name in ("triton", "flashinfer") and runner.device == "cpu":
            raise UsageError(f"{flag} {name} needs a GPU and --device is cpu")
        if name == "flashinfer" and not flashinfer_tools.is_installed():
            raise UsageError(
                f"{flag} flashinfer: {flashinfer_tools.PACKAGE} is not installed; "
                f"{flashinfer_tools.INSTALL}"
            )


def _check_graph_sizes(runner: RunnerConfig, origins: Mapping[str, str]) -> None:
    graph = runner.graph
    bounds = (
        ("cuda_graph_bs", graph.cuda_graph_bs, "cuda_graph_max_bs", graph.cuda_graph_max_bs),
        ("cuda_graph_bs", graph.cuda_graph_bs, "max_running_requests", runner.max_running_requests),
        (
            "piecewise_cuda_graph_tokens",
            graph.piecewise_cuda_graph_tokens,
            "piecewise_cuda_graph_max_tokens",
            graph.piecewise_cuda_graph_max_tokens,
        ),
        (
            "piecewise_cuda_graph_tokens",
            graph.piecewise_cuda_graph_tokens,
            "chunked_prefill_size",
            runner.chunked_prefill_size,
        ),
    )
    for name, sizes, limit_name, limit in bounds:
        if sizes is not None and limit is not None and max(sizes) > limit:
            flag, limit_flag = origins[name], origins[limit_name]
            raise UsageError(f"{flag} has {max(sizes)}, which is above {limit_flag} {limit}")


def _check_memory(runner: RunnerConfig) -> None:
    page_size = runner.page_size or 16  # the smaller of the sizes that the engine chooses
    if runner.max_total_tokens is not None and runner.max_total_tokens < page_size:
        raise UsageError(
            f"--max-total-tokens {runner.max_total_tokens} is less than one page "
            f"(--page-size {page_size})"
        )


def _without_effect(graph: GraphConfig, origins: Mapping[str, str]) -> Iterator[str]:
    dependants = {
        "disable_cuda_graph": (
            "cuda_graph_bs",
            "cuda_graph_max_bs",
            "disable_cuda_graph_padding",
            "enable_torch_compile",
            "torch_compile_max_bs",
        ),
        "disable_piecewise_cuda_graph": (
            "piecewise_cuda_graph_tokens",
            "piecewise_cuda_graph_max_tokens",
            "piecewise_cuda_graph_compiler",
        ),
    }
    for switch, names in dependants.items():
        for name in names:
            if getattr(graph, switch) and name in origins:
                yield f"{origins[name]} has no effect with {origins[switch]}"
    if "torch_compile_max_bs" in origins and not graph.enable_torch_compile:
        yield f"{origins['torch_compile_max_bs']} has no effect without --enable-torch-compile"
    if graph.disable_cuda_graph_padding and graph.cuda_graph_bs is not None:
        yield (
            f"{origins['disable_cuda_graph_padding']} has no effect on the sizes that "
            f"{origins['cuda_graph_bs']} gives"
        )


def _exposed(config: ServeConfig) -> Iterator[str]:
    http = config.http
    has_key = http.api_key is not None or http.api_key_file is not None
    if not has_key and not http.host.startswith(_LOOPBACK):
        yield (
            f"--host {http.host} serves other machines and no --api-key is set: "
            "anyone who reaches the port can use the model"
        )
