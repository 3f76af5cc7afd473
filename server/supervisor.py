"""The loop that watches the process tree: readiness, signals, drain, deaths, exit codes.

One rule carries it: the tree lives and dies as a whole. It knows neither HTTP nor models; it
is handed running children and a way to send the first request. It imports no torch.
"""

from __future__ import annotations

import enum
import logging
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence

from duograph.scheduler.channel import Receiver
from duograph.scheduler.exit_codes import ExitCode
from duograph.scheduler.messages import (
    EngineStatus,
    FrontendBeat,
    Heartbeat,
    ProcessFailed,
    ToSupervisor,
)
from duograph.server.child import Child
from duograph.server.signals import END_SIGNALS, SignalQueue
from duograph.server.startup import StartupReport

_log = logging.getLogger(__name__)

# What ends a service may send SIGTERM to the whole group, of which make then passes its own on.
SAME_SIGNAL_S = 1.0
HARD_STOP_S = 5.0  # beyond --shutdown-timeout, then children are killed
END_GRACE_S = 2.0  # for children to leave by themselves once the tree is ending
FRONTEND_START_S = 60.0  # from a ready engine to the first beat of a frontend, at most
LAST_WORDS_S = 0.5  # a child's last message may come after its death
POLL_S = 0.5  # for the clock; signals, deaths and messages wake the loop at once


class State(enum.Enum):
    STARTING = "starting"
    WARMING_UP = "warming up"
    READY = "ready"
    DRAINING = "draining"


class Supervisor:
    """``run`` returns when every child is gone."""

    def __init__(
        self,
        *,
        scheduler: Child,
        frontends: Sequence[Child],
        messages: Receiver[ToSupervisor],
        signals: SignalQueue,
        report: StartupReport,
        first_request: Callable[[], str | None] | None,
        shutdown_timeout: float,
        silence_timeout: float,
    ) -> None:
        """``first_request`` sends one generation and returns None, or what went wrong; it runs
        in a thread. ``shutdown_timeout`` and ``silence_timeout``, the longest time between two
        heartbeats of a ready engine or of a frontend, are in seconds."""
        self._scheduler = scheduler
        self._frontends = list(frontends)
        self._messages = messages
        self._signals = signals
        self._report = report
        self._first_request = first_request
        self._shutdown_timeout = shutdown_timeout
        self._silence_timeout = silence_timeout
        self._last_heartbeat: float | None = None
        self._first_heartbeat: float | None = None
        self._last_beats: dict[int, float] = {}  # by index of the frontend
        self._state = State.STARTING
        self._started_at = time.monotonic()
        self._drain_deadline = 0.0
        self._same_until = 0.0
        self._last_words: ProcessFailed | None = None
        self._warm_up_result: list[str | None] = []  # filled by the thread, at most one entry
        self._exit: ExitCode | None = None

    def run(self) -> ExitCode:
        poller = select.poll()
        poller.register(self._signals.fileno(), select.POLLIN)
        poller.register(self._messages.fileno(), select.POLLIN)
        try:
            while self._exit is None:
                poller.poll(POLL_S * 1000)
                self._take_messages()
                self._take_signals()
                self._take_warm_up()
                self._take_deaths()
                self._check_heartbeat()
                self._check_frontends()
            return self._exit
        finally:
            self._report.close()
            self._end_children()

    def _take_messages(self) -> None:
        for message in self._messages.drain():
            if isinstance(message, ProcessFailed):
                self._last_words = self._last_words or message
            elif isinstance(message, Heartbeat):
                self._last_heartbeat = time.monotonic()
            elif isinstance(message, FrontendBeat):
                self._last_beats[message.index] = time.monotonic()
                if message.draining and self._state is not State.DRAINING and self._exit is None:
                    # all at the same time: after it has ended, the others would begin anew
                    self._drain(f"frontend {message.index} was asked to end")
            elif isinstance(message, EngineStatus):
                self._report.show(message)
                if message.phase == "ready" and self._state is State.STARTING:
                    self._start_warm_up()

    def _start_warm_up(self) -> None:
        self._state = State.WARMING_UP
        first_request = self._first_request
        if first_request is None:
            self._become_ready()
            return

        def send() -> None:
            self._warm_up_result.append(first_request())
            self._signals.wake()

        threading.Thread(target=send, name="warm-up", daemon=True).start()

    def _take_warm_up(self) -> None:
        if self._state is not State.WARMING_UP or not self._warm_up_result:
            return
        problem = self._warm_up_result.pop()
        if problem is None:
            self._become_ready()
        elif self._all_alive():  # else the death is the better explanation
            _log.error("the first request failed: %s", problem)
            self._exit = ExitCode.INTERNAL

    def _become_ready(self) -> None:
        self._state = State.READY
        self._report.close()
        _log.info("Ready after %.1f s", time.monotonic() - self._started_at)
        _log.info("The server is fired up and ready to roll!")

    def _take_signals(self) -> None:
        for number in self._signals.take():
            if number not in END_SIGNALS:
                continue
            if self._state is State.DRAINING:
                if self._is_the_same(number):
                    continue
                _log.warning("second signal: ending now")
                self._exit = ExitCode.INTERRUPTED
                for child in self._children():
                    child.send(signal.SIGKILL)
                return
            self._drain(signal.Signals(number).name)

    def _is_the_same(self, number: int) -> bool:
        """Whether a signal is but an echo of the one that began the drain."""
        return number == signal.SIGTERM and time.monotonic() < self._same_until

    def _drain(self, cause: str) -> None:
        """Frontends refuse new requests, finish the running ones and leave; then the scheduler
        is ended."""
        _log.info("%s: draining, at most %g s", cause, self._shutdown_timeout)
        if self._state in (State.STARTING, State.WARMING_UP):
            self._scheduler.send(signal.SIGTERM)  # nobody waits for an answer
        self._state = State.DRAINING
        now = time.monotonic()
        self._same_until = now + SAME_SIGNAL_S
        self._drain_deadline = now + self._shutdown_timeout + HARD_STOP_S
        for frontend in self._frontends:
            frontend.send(signal.SIGTERM)

    def _take_deaths(self) -> None:
        if self._exit is not None:
            return  # it has been decided; these may be deaths that the decision brought
        asked = signal.SIGTERM in self._scheduler.signals_sent
        if self._scheduler.exit_code() is not None and not asked:
            self._child_died(self._scheduler, ExitCode.SCHEDULER_DIED)
            return
        codes = [_exit_code(frontend) for frontend in self._frontends]
        for frontend, code in zip(self._frontends, codes, strict=True):
            if code not in (None, 0):
                self._child_died(frontend, ExitCode.FRONTEND_DIED)
                return
        if self._state is not State.DRAINING:
            if 0 in codes:  # somebody sent SIGTERM to a frontend: the rest follows
                self._drain(f"{self._frontends[codes.index(0)].role} was asked to end")
        elif None not in codes:
            self._exit = ExitCode.OK
        elif time.monotonic() > self._drain_deadline:
            _log.warning("running requests did not end in time and are cut off")
            self._exit = ExitCode.OK

    def _check_heartbeat(self) -> None:
        """The engine watches itself; this is for when it cannot, because it is stopped."""
        last = self._last_heartbeat
        if self._exit is None and last is not None:
            silence = time.monotonic() - last
            if silence > self._silence_timeout and self._scheduler.exit_code() is None:
                _log.error("the scheduler process has been silent for %.0f s", silence)
                self._exit = ExitCode.SCHEDULER_DIED
                self._scheduler.send(signal.SIGKILL)

    def _check_frontends(self) -> None:
        """One that is stopped or stuck still holds its clients, and connections wait for it."""
        if self._exit is not None:
            return
        now = time.monotonic()
        for index, frontend in enumerate(self._frontends):
            last = self._last_beats.get(index)
            if last is None and self._last_heartbeat is None:
                continue  # nobody is served yet
            if last is None:
                self._first_heartbeat = self._first_heartbeat or now
                silence, limit = now - self._first_heartbeat, FRONTEND_START_S
            else:
                silence, limit = now - last, self._silence_timeout
            if silence > limit and frontend.exit_code() is None:
                _log.error("the %s process has been silent for %.0f s", frontend.role, silence)
                self._exit = ExitCode.FRONTEND_DIED
                frontend.send(signal.SIGKILL)
                return

    def _child_died(self, child: Child, code: ExitCode) -> None:
        if self._last_words is None and self._messages.wait(LAST_WORDS_S):
            self._take_messages()
        words = self._last_words
        if words is not None:
            _log.error("%s: %s", child.role, words.message)
            known = {int(known) for known in ExitCode} - {ExitCode.OK, ExitCode.INTERNAL}
            self._exit = ExitCode(words.exit_code) if words.exit_code in known else code
        else:
            _log.error("%s", child.death_notice())
            own = (ExitCode.USAGE, ExitCode.MODEL, ExitCode.OUT_OF_MEMORY)
            returned = child.exit_code()
            self._exit = ExitCode(returned) if returned in own else code

    def _end_children(self) -> None:
        """Asks, waits END_GRACE_S, kills. Every child is reaped when it returns.

        After a death SIGQUIT tells the frontends that waiting is useless: they end what they
        stream with an error event.
        """
        for frontend in self._frontends:
            frontend.send(signal.SIGTERM if self._exit is ExitCode.OK else signal.SIGQUIT)
        self._scheduler.send(signal.SIGTERM)
        deadline = time.monotonic() + END_GRACE_S
        while not self._none_alive() and time.monotonic() < deadline:
            select.select([self._signals.fileno()], [], [], 0.05)
            signals = [number for number in self._signals.take() if number in END_SIGNALS]
            if not all(map(self._is_the_same, signals)):
                break  # the user does not want to wait
        for child in self._children():
            child.send(signal.SIGKILL)
        for child in self._children():
            child.process.wait()

    def _children(self) -> list[Child]:
        return [*self._frontends, self._scheduler]

    def _all_alive(self) -> bool:
        return all(child.exit_code() is None for child in self._children())

    def _none_alive(self) -> bool:
        return all(child.exit_code() is not None for child in self._children())


def _exit_code(child: Child) -> int | None:
    """As Child.exit_code; 0 for one that was told to end before it could listen to signals."""
    code = child.exit_code()
    return 0 if code is not None and code < 0 and -code in child.signals_sent else code
