"""What a failed start or a dead engine means: an exit code and one sentence with a remedy."""

from __future__ import annotations

from collections.abc import Callable

from duograph.runners.config import ConfigError
from duograph.scheduler.exit_codes import ExitCode
from duograph.scheduler.messages import Phase

_OUT_OF_MEMORY_ADVICE: dict[Phase, str] = {
    "loading_weights": "the weights do not fit: a smaller model or --dtype bfloat16 needs less",
    "planning_memory": "no room for the KV pool and the tables of running requests: raise "
    "--mem-fraction-static, or set a smaller --max-total-tokens, --max-running-requests or "
    "--context-length",
    "compiling": "lower --mem-fraction-static or --chunked-prefill-size, or use "
    "--disable-piecewise-cuda-graph",
    "capturing_decode": "lower --mem-fraction-static or --cuda-graph-max-bs, or use "
    "--disable-cuda-graph",
    "capturing_prefill": "lower --mem-fraction-static or --piecewise-cuda-graph-max-tokens, or "
    "use --disable-piecewise-cuda-graph",
    "warming_up": "lower --mem-fraction-static or --chunked-prefill-size",
    "ready": "lower --mem-fraction-static, --chunked-prefill-size or --max-running-requests",
}


def explain(
    error: BaseException, phase: Phase, numbers: Callable[[], str] = str
) -> tuple[ExitCode, str]:
    """``phase`` is the one in which ``error`` came up; ``numbers`` is asked for a sentence to add
    if memory was short. One line; no traceback."""
    # The runner floor imports torch; whoever explains a failure without it is still starting.
    from duograph.runners.config_file import ModelError
    from duograph.runners.graph import is_out_of_memory
    from duograph.runners.memory_plan import MemoryPlanError

    text = " ".join(str(error).split()) or type(error).__name__
    no_host_memory = isinstance(error, MemoryError) or "DefaultCPUAllocator" in text
    if no_host_memory or is_out_of_memory(error):
        advice = _OUT_OF_MEMORY_ADVICE.get(phase, "a smaller model needs less")
        said = f"out of memory while {_doing(phase)}: {advice} ({text}). {numbers()}"
        return ExitCode.OUT_OF_MEMORY, said.strip()
    if isinstance(error, MemoryPlanError):
        return ExitCode.OUT_OF_MEMORY, f"{text}. {numbers()}".strip()  # it has its own advice
    if isinstance(error, ConfigError):
        return ExitCode.USAGE, text
    if isinstance(error, ModelError):
        return ExitCode.MODEL, text
    if phase == "loading_weights":
        return ExitCode.MODEL, f"the model cannot be loaded: {type(error).__name__}: {text}"
    return ExitCode.SCHEDULER_DIED, f"failed while {_doing(phase)}: {type(error).__name__}: {text}"


def _doing(phase: Phase) -> str:
    return "serving" if phase == "ready" else phase.replace("_", " ")
