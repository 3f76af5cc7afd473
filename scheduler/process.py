"""The engine process: ``python -m duograph.scheduler --config-fd N``.

Set-up, in order: config, death with the parent, signals, sockets, model, warm-up, ready; then
one of the two loops until SIGTERM or a failure. Exit codes are those of exit_codes.py; whatever
goes wrong is said once, in one sentence, to the supervisor.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType

import msgspec
import setproctitle

from duograph.runners.sampling_params import SamplingParams
from duograph.scheduler.admission import EngineLimits
from duograph.scheduler.batch_builder import BatchBuilder
from duograph.scheduler.config import SchedulerConfig
from duograph.scheduler.engine import Engine, Worker
from duograph.scheduler.engine_config import EngineConfig
from duograph.scheduler.exit_codes import ExitCode
from duograph.scheduler.failures import explain
from duograph.scheduler.grammar import GrammarCompiler, GrammarError, GrammarLibrary, NoGrammars
from duograph.scheduler.grammar_gate import GrammarGate
from duograph.scheduler.grammar_masks import GrammarState, MaskMaker, OpenGrammar
from duograph.scheduler.logs import configure_logging
from duograph.scheduler.loop import overlap_loop, plain_loop
from duograph.scheduler.messages import (
    EngineInfo,
    EngineStatus,
    GenerateRequest,
    Phase,
    ProcessFailed,
)
from duograph.scheduler.model_worker import LoadedWorker, Progress, load_worker
from duograph.scheduler.scheduler import Scheduler
from duograph.scheduler.start_summary import memory_numbers, summary_lines
from duograph.scheduler.step import CompiledRequest, CompletedStep, Event
from duograph.scheduler.wires import Wires

_log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_LAST_WORDS_MS = 1_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="duograph.scheduler")
    parser.add_argument("--config-fd", type=int, required=True)
    return run_engine(read_config(parser.parse_args().config_fd), load_worker)


def read_config(fd: int) -> EngineConfig:
    """Reads the JSON document to its end and closes ``fd``. Raises msgspec.ValidationError."""
    with os.fdopen(fd, "rb") as file:
        return msgspec.json.decode(file.read(), type=EngineConfig)


def run_engine(config: EngineConfig, load: Callable[[EngineConfig, Progress], LoadedWorker]) -> int:
    """Returns the exit code. ``load`` makes the worker and reports its progress."""
    tie_to_parent(config.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C: the supervisor decides
    signal.signal(signal.SIGTERM, _leave_now)
    setproctitle.setproctitle("duograph: scheduler")
    configure_logging(config.log_level, config.log_format)
    faulthandler.enable()
    wires = Wires(config.run_dir, config.num_frontends)
    start = _Start(wires)
    try:
        start.report("starting", 0, 0)
        engine = start.create_engine(config, load)
        signal.signal(signal.SIGTERM, lambda *_: engine.stop())
        loop = plain_loop if config.scheduler.disable_overlap_schedule else overlap_loop
        try:
            loop(engine)
        except Exception as error:
            _log.exception("the engine failed")
            code, text = explain(error, "ready", partial(memory_numbers, config))
            engine.fail(code, text)
            return code
        engine.close()
        return ExitCode.OK
    except Exception as error:  # while starting
        code, text = explain(error, start.phase, partial(memory_numbers, config))
        if code not in (ExitCode.USAGE, ExitCode.MODEL, ExitCode.OUT_OF_MEMORY):
            _log.exception("the start failed")  # the sentence itself is the supervisor's to print
        wires.to_supervisor(ProcessFailed(code, text))
        return code
    finally:
        faulthandler.cancel_dump_traceback_later()
        wires.close(_LAST_WORDS_MS)
        logging.shutdown()


class _Start:
    """From nothing to a ready engine; knows how far it is."""

    def __init__(self, wires: Wires) -> None:
        self._wires = wires
        self.phase: Phase = "starting"

    def report(self, phase: Phase, done: int, total: int) -> None:
        self.phase = phase
        status = EngineStatus(phase, done, total)
        self._wires.to_frontends(status)
        self._wires.to_supervisor(status)

    def create_engine(
        self, config: EngineConfig, load: Callable[[EngineConfig, Progress], LoadedWorker]
    ) -> Engine:
        now = time.monotonic()
        before = now - (now if config.spawned_at is None else config.spawned_at)
        loaded = load(config, self.report)
        limits = loaded.limits
        builder = BatchBuilder(
            page_size=limits.page_size,
            pinned=loaded.is_cuda,
            vocab_size=limits.vocab_size,
            masks=MaskMaker(budget_s=config.scheduler.grammar_timeout),
        )
        self.report("warming_up", 0, 0)
        with ThreadPoolExecutor(1) as beside:
            library = beside.submit(load_grammars, config, limits)
            warm_up(loaded.worker, builder, limits)
        compiler = library.result()
        # What start-up made stays for ever: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        gc.enable()  # see __main__.py
        loaded.stages.lap("warm_up")
        seconds = {"process": before, **loaded.stages.seconds}
        _log.info("%s", start_line(seconds))
        for line in summary_lines(loaded.details, limits, loaded.worker.graph_stats()):
            _log.info("%s", line)
        engine = Engine(
            scheduler=Scheduler(config.scheduler, limits, config.num_frontends),
            worker=loaded.worker,
            builder=builder,
            wires=self._wires,
            gate=GrammarGate(
                compiler,
                timeout_s=config.scheduler.grammar_timeout,
                max_waiting=config.scheduler.max_queue,
            ),
            model_name=config.served_name,
            log_interval=config.scheduler.decode_log_interval,
            watchdog_timeout=config.scheduler.watchdog_timeout,
        )
        self._wires.to_frontends(_info(loaded, seconds))
        self.report("ready", 0, 0)
        return engine


def load_grammars(config: EngineConfig, limits: EngineLimits) -> GrammarCompiler:
    """Never fails: without the library, requests that ask for a grammar are refused."""
    if config.scheduler.grammar_backend == "none":
        return NoGrammars("the server was started with --grammar-backend none")
    try:
        return GrammarLibrary(
            Path(config.model_folder),
            vocab_size=limits.vocab_size,
            eos_token_ids=limits.eos_token_ids,
        )
    except GrammarError as error:
        _log.warning("structured output is off: %s", error)
        return NoGrammars(str(error))


def start_line(seconds: dict[str, float]) -> str:
    """What the start was spent on, of at least a tenth of a second each."""
    parts = [f"{name} {taken:.1f}" for name, taken in seconds.items() if taken >= 0.1]
    return f"Engine started in {sum(seconds.values()):.1f} s: {', '.join(parts)}"


def _info(loaded: LoadedWorker, seconds: dict[str, float]) -> EngineInfo:
    """``seconds`` of the whole start by stage."""
    limits = loaded.limits
    graphs = loaded.worker.graph_stats() | {"start_seconds": seconds}
    return EngineInfo(
        max_total_num_tokens=limits.max_total_num_tokens,
        max_running_requests=limits.max_running_requests,
        context_length=limits.context_length,
        vocab_size=limits.vocab_size,
        details={**asdict(limits), **loaded.details, "graphs": graphs},
    )


def warm_up(worker: Worker, builder: BatchBuilder, limits: EngineLimits) -> None:
    """Short generations through prefill and decode, on a scheduler of its own: a plain one, one
    that takes every way round the graph's own sampling and one that follows a grammar, so that
    no request is the first to compile a kernel.

    Raises:
        ModelError: the model's logits are not finite.
    """
    scheduler = Scheduler(SchedulerConfig(disable_radix_cache=True), limits, num_frontends=1)
    plain = SamplingParams(max_new_tokens=3, temperature=0.0, ignore_eos=True)
    filtered = SamplingParams(
        max_new_tokens=3,
        min_new_tokens=2,
        temperature=0.8,
        top_p=0.9,
        top_k=min(8, limits.vocab_size),
        min_p=0.01,
        repetition_penalty=1.1,
        logprobs=1,
    )
    requests: list[Event] = [
        GenerateRequest(rid=rid, input_ids=[0] * 4, sampling=sampling)
        for rid, sampling in enumerate((plain, filtered))
    ]
    if builder.takes_grammars:
        constrained = GenerateRequest(rid=2, input_ids=[0] * 4, sampling=plain)
        requests.append(CompiledRequest(constrained, GrammarState(OpenGrammar())))
    for request in requests:
        events = [request]
        while (step := scheduler.step(events, 0.0)).plan is not None:
            pending = worker.launch(builder.build(step.plan))
            builder.launched(pending)
            result = pending.wait()
            check_logits(result)
            events = [result]


def check_logits(result: CompletedStep) -> None:
    """Weights with NaN in them give tokens like any others; their probabilities do not.
    Raises ModelError."""
    # the runner floor's errors are loaded with the model, not with this module
    from duograph.runners.config_file import ModelError

    if not all(math.isfinite(found.logprob) for found in result.logprobs.values()):
        raise ModelError("the model's output is not finite: its weights hold NaN or infinity")


def tie_to_parent(parent_pid: int) -> None:
    """This process dies with its parent. Raises SystemExit if that is dead already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise SystemExit(ExitCode.INTERNAL)


def _leave_now(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(ExitCode.OK)  # while starting: nobody waits for an answer


def leave(exit_code: int) -> None:
    """Ends the process after a failure. The device may be in any state: nothing is taken down in
    order, it could hang."""
    if exit_code:
        sys.stderr.flush()
        os._exit(exit_code)
