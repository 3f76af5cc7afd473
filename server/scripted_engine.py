"""An engine without a model, for tests and for measuring a frontend alone:
``python -m duograph.server.scripted_engine --config FILE``.

It speaks the scheduler's messages. The output of a request is its own prompt, token by token, and
then the end-of-sequence token; so a client that sends token ids knows every token of the answer.
What else it does is asked for in ``cache_salt``, words separated by spaces:
``fail:CODE:N`` ends with that error after N tokens, ``hang`` never gives a token,
``hang:N`` none after N tokens. Knows no text, no sampling, no memory.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import zmq

from duograph.scheduler.channel import Receiver, Sender, frontend_address, scheduler_address
from duograph.scheduler.messages import (
    RID_FRONTEND_SHIFT,
    AbortRequest,
    ControlAnswer,
    ControlRequest,
    EngineInfo,
    EngineStatus,
    ErrorCode,
    Finished,
    FinishReason,
    GenerateRequest,
    Heartbeat,
    Logprobs,
    MetricsSnapshot,
    Phase,
    StepTokens,
    ToFrontend,
    ToScheduler,
)
from duograph.server.child import die_with_parent

HEARTBEAT_S = 0.5


@dataclass(frozen=True, kw_only=True)
class ScriptedEngineConfig:
    """``step_s`` is the least time between two steps; ``phase`` other than ready stays there.
    ``log`` gets one JSON line per message received."""

    run_dir: str
    num_frontends: int = 1
    vocab_size: int = 512
    eos_token: int = 0
    context_length: int = 4096
    max_total_num_tokens: int = 1 << 20
    max_running_requests: int = 256
    step_s: float = 0.001
    phase: Phase = "ready"
    done: int = 0
    total: int = 0
    log: str | None = None


@dataclass(slots=True)
class _Running:
    request: GenerateRequest
    sent: int = 0
    hang_after: int | None = None
    fail_after: int | None = None
    fail_code: ErrorCode = "internal"


@dataclass
class ScriptedEngine:
    """``run`` returns after ``stop``."""

    config: ScriptedEngineConfig
    _running: dict[int, _Running] = field(default_factory=dict)
    _steps: int = 0
    _aborted: int = 0
    _accepted: int = 0
    _stopping: bool = False

    def stop(self, *_: object) -> None:
        self._stopping = True

    def run(self) -> None:
        config = self.config
        context: zmq.Context[Any] = zmq.Context()
        self._log = open(config.log, "a", encoding="utf-8") if config.log else None
        self._receiver: Receiver[ToScheduler] = Receiver(
            context, scheduler_address(config.run_dir), ToScheduler
        )
        self._senders = [
            Sender(context, frontend_address(config.run_dir, index))
            for index in range(config.num_frontends)
        ]
        self._greet()
        heartbeat_due = next_step = time.monotonic()
        while not self._stopping:
            now = time.monotonic()
            if now >= heartbeat_due:
                self._report()
                heartbeat_due = now + HEARTBEAT_S
            for message in self._receiver.drain():
                self._take(message)
            if self._running and now >= next_step:
                self._step()
                # a late step is made up for, a long pause is not
                next_step = max(next_step + config.step_s, now - config.step_s)
            pause = next_step - time.monotonic() if self._running else HEARTBEAT_S
            if pause > 0.0005:
                self._receiver.wait(min(pause, HEARTBEAT_S))
        for sender in self._senders:
            sender.close()
        self._receiver.close()
        context.term()
        if self._log:
            self._log.close()

    def _greet(self) -> None:
        config = self.config
        info = EngineInfo(
            max_total_num_tokens=config.max_total_num_tokens,
            max_running_requests=config.max_running_requests,
            context_length=config.context_length,
            vocab_size=config.vocab_size,
            details={"graphs": {"decode": {"sizes": [1, 2, 4]}}},
        )
        self._send_all(info)
        self._send_all(EngineStatus(phase=config.phase, done=config.done, total=config.total))

    def _report(self) -> None:
        running = len(self._running)
        self._send_all(Heartbeat(steps=self._steps, running=running, waiting=0))
        self._send_all(
            MetricsSnapshot(
                counters={
                    "sglang:num_requests_total": float(self._accepted),
                    "sglang:num_aborted_requests_total": float(self._aborted),
                    'duograph_graph_replays_total{phase="decode",size="4"}': float(self._steps),
                },
                gauges={'sglang:num_running_reqs{model_name="scripted"}': float(running)},
                histograms={"sglang:queue_time_seconds": ([0.1, 1.0], [1, 2, 3], 4.5)},
            )
        )

    def _send_all(self, message: ToFrontend) -> None:
        for sender in self._senders:
            sender.send(message)

    def _take(self, message: ToScheduler) -> None:
        if self._log:
            line = {"kind": type(message).__name__, "at": time.time()}
            self._log.write(json.dumps(line | msgspec.to_builtins(message)) + "\n")
            self._log.flush()
        if isinstance(message, AbortRequest):
            self._aborted += self._running.pop(message.rid, None) is not None
        elif isinstance(message, ControlRequest):
            frontend = message.id >> RID_FRONTEND_SHIFT
            self._senders[frontend].send(self._obey(message))
        else:
            self._accepted += 1
            self._running[message.rid] = _scripted(message)

    def _obey(self, order: ControlRequest) -> ControlAnswer:
        match order.command:
            case "abort_named" | "abort_all":
                named = [
                    running
                    for running in self._running.values()
                    if order.command == "abort_all" or running.request.name == order.argument
                ]
                for running in named:
                    running.fail_after, running.fail_code = 0, "aborted"
                return ControlAnswer(order.id, True, str(len(named)))
            case "flush_cache" if self._running:
                return ControlAnswer(order.id, False, "requests are in work")
        return ControlAnswer(order.id, True, f"{order.command} done")

    def _step(self) -> None:
        """One token for everyone, in one message per frontend."""
        self._steps += 1
        by_frontend: dict[int, list[_Running]] = {}
        for running in self._running.values():
            frontend = running.request.rid >> RID_FRONTEND_SHIFT
            by_frontend.setdefault(frontend, []).append(running)
        for frontend, group in by_frontend.items():
            message = self._tokens_of(group)
            while not self._senders[frontend].send(message) and not self._stopping:
                time.sleep(0.001)  # the frontend is far behind

    def _tokens_of(self, group: Iterable[_Running]) -> StepTokens:
        rids: list[int] = []
        tokens: list[int] = []
        finished: list[Finished] = []
        logprobs: dict[int, Logprobs] = {}
        cached: dict[int, int] = {}
        scores: dict[int, list[Logprobs]] = {}
        for running in group:
            request, sent = running.request, running.sent
            if running.fail_after is not None and sent >= running.fail_after:
                finished.append(self._end(running, "error"))
                continue
            if running.hang_after is not None and sent >= running.hang_after:
                continue
            if sent == 0:
                cached[request.rid] = _cached_tokens(request)
                if request.sampling.prompt_logprobs is not None:
                    scores[request.rid] = self._scores(request)
                if request.sampling.max_new_tokens == 0:
                    finished.append(self._end(running, "length"))
                    continue
            token = self._next_token(running)
            running.sent += 1
            if request.sampling.logprobs is not None:
                logprobs[len(rids)] = self._logprobs(running, token)
            rids.append(request.rid)
            tokens.append(token)
            reason = self._reason(running, token)
            if reason is not None:
                finished.append(self._end(running, reason, token))
        return StepTokens(rids, tokens, finished, logprobs or None, cached or None, scores or None)

    def _next_token(self, running: _Running) -> int:
        prompt = running.request.input_ids
        if running.request.sampling.ignore_eos:
            return prompt[running.sent % len(prompt)]
        return prompt[running.sent] if running.sent < len(prompt) else self.config.eos_token

    def _reason(self, running: _Running, token: int) -> FinishReason | None:
        sampling = running.request.sampling
        stops = sampling.stop_token_ids
        if not sampling.ignore_eos:
            stops = (*stops, self.config.eos_token)
        if token in stops and running.sent >= sampling.min_new_tokens:
            return "stop"
        return "length" if running.sent >= sampling.max_new_tokens else None

    def _end(self, running: _Running, reason: FinishReason, token: int | None = None) -> Finished:
        request = running.request
        del self._running[request.rid]
        failed = reason == "error"
        return Finished(
            rid=request.rid,
            reason=reason,
            prompt_tokens=len(request.input_ids),
            completion_tokens=running.sent,
            cached_tokens=_cached_tokens(request),
            matched_token=token if reason == "stop" else None,
            error_code=running.fail_code if failed else None,
            error_message="scripted failure" if failed else "",
        )

    def _logprobs(self, running: _Running, token: int) -> Logprobs:
        return self._told(token, -0.5 * running.sent, running.request.sampling.logprobs or 0)

    def _scores(self, request: GenerateRequest) -> list[Logprobs]:
        """-0.25 for token 1 of the prompt, -0.5 for token 2 and so on."""
        sampling, ids = request.sampling, request.input_ids
        return [
            self._told(ids[at], -0.25 * at, sampling.prompt_logprobs or 0)
            for at in range(sampling.prompt_logprobs_start, len(ids))
        ]

    def _told(self, token: int, logprob: float, k: int) -> Logprobs:
        return Logprobs(
            logprob=logprob,
            top_ids=[(token + step) % self.config.vocab_size for step in range(k)],
            top_logprobs=[logprob - step for step in range(k)],
        )


def _cached_tokens(request: GenerateRequest) -> int:
    return len(request.input_ids) // 2


def _scripted(request: GenerateRequest) -> _Running:
    running = _Running(request)
    for word in request.cache_salt.split():
        verb, *arguments = word.split(":")
        if verb == "hang":
            running.hang_after = int(arguments[0]) if arguments else 0
        elif verb == "fail":
            running.fail_code = cast(ErrorCode, arguments[0])
            running.fail_after = int(arguments[1])
    return running


def main() -> int:
    parser = argparse.ArgumentParser(prog="duograph.server.scripted_engine")
    parser.add_argument("--config", type=Path, required=True, help="JSON file to read")
    die_with_parent()
    config = msgspec.json.decode(parser.parse_args().config.read_bytes(), type=ScriptedEngineConfig)
    engine = ScriptedEngine(config)
    signal.signal(signal.SIGTERM, engine.stop)
    engine.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
