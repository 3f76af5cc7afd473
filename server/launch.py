"""``duograph serve``: from the configuration to a running process tree and back to nothing.

Order: port, model, run folder, children, supervision. Each step that fails ends with one
sentence and its exit code, and undoes what was done before. No torch, no HTTP framework.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import setproctitle
import zmq

from duograph.runners.config import RunnerConfig
from duograph.runners.model_config import GenerationDefaults, ModelConfig
from duograph.runners.model_config import ModelError as ModelConfigError
from duograph.scheduler.channel import Receiver, supervisor_address
from duograph.scheduler.engine_config import EngineConfig
from duograph.scheduler.exit_codes import ExitCode
from duograph.scheduler.logs import configure_logging
from duograph.scheduler.messages import ToSupervisor
from duograph.server import listener as tcp
from duograph.server.arg_checks import check_key, check_together
from duograph.server.args import ServeConfig, options
from duograph.server.artifact_cache import engine_environment
from duograph.server.child import Child, start_child
from duograph.server.config import FrontendConfig, HttpConfig
from duograph.server.model_cache import ModelError
from duograph.server.model_store import LocalModel, resolve_model
from duograph.server.options import UsageError
from duograph.server.run_folder import RunFolder, parent_folder, sweep_stale
from duograph.server.signals import Interrupted, SignalQueue, interruptible
from duograph.server.startup import StartupReport, warm_up
from duograph.server.supervisor import Supervisor

_log = logging.getLogger(__name__)

MAX_OPEN_FILES = 65_536
CORES_PER_FRONTEND = 4
WATCHDOG_GRACE_S = 2.0  # the engine's own watchdog comes first: it shows where it is stuck
MAX_AUTO_FRONTENDS = 8


@dataclass(frozen=True)
class Plan:
    """What the children are started from."""

    config: ServeConfig
    model: LocalModel
    api_keys: tuple[str, ...]
    listeners: tuple[socket.socket, ...]  # one for each frontend
    run_dir: Path

    @property
    def num_frontends(self) -> int:
        return len(self.listeners)

    @property
    def served_names(self) -> tuple[str, ...]:
        return self.config.http.served_model_name or (self.model.name,)


def serve(config: ServeConfig, environ: Mapping[str, str]) -> ExitCode:
    """Runs the server until it is told to end or a process dies.

    Raises:
        UsageError: flags that do not fit together, or an address that cannot be bound.
    """
    warnings = check_together(config)
    api_keys = read_api_keys(config.http)
    _prepare_process(config)
    try:
        with interruptible():
            workers = config.http.frontend_workers or default_frontend_workers()
            listeners = tcp.bind(config.http.host, config.http.port, workers)
            for line in (*config.notes, *warnings):
                _log.warning("%s", line)
            model = resolve_model(
                config.runner.model_path, config.runner.load_format, environ, _log.info
            )
            check_model(model, config.runner)
            _log.info("Model: %s (%s)", model.name, model.folder)
    except tcp.PortInUse as error:
        _log.error("%s", error)
        return ExitCode.PORT_IN_USE
    except tcp.AddressError as error:
        raise UsageError(str(error)) from error
    except (ModelError, ModelConfigError) as error:
        _log.error("%s", error)
        return ExitCode.MODEL
    except Interrupted:
        return ExitCode.OK
    parent = parent_folder(environ)
    sweep_stale(parent)
    with contextlib.ExitStack() as closing, RunFolder(parent) as folder:
        for listener in listeners:
            closing.enter_context(listener)
        plan = Plan(config, model, api_keys, tuple(listeners), folder.path)
        try:
            return _run_tree(plan, environ)
        except tcp.PortInUse as error:
            _log.error("%s", error)
            return ExitCode.PORT_IN_USE


def check_model(model: LocalModel, runner: RunnerConfig) -> None:
    """What can be known from the model's two config files, before an engine spends seconds to
    start.

    Raises:
        ModelConfigError: a model that cannot be served.
        UsageError: --context-length is beyond the model.
    """
    GenerationDefaults.from_folder(model.folder)
    known = ModelConfig.from_folder(model.folder).context_length
    if runner.context_length is not None and runner.context_length > known:
        raise UsageError(f"--context-length {runner.context_length} is above the model's {known}")


def read_api_keys(http: HttpConfig) -> tuple[str, ...]:
    """All keys that clients may use; empty = none is asked for. Raises UsageError."""
    keys = [] if http.api_key is None else [http.api_key]
    if http.api_key_file is not None:
        origin = f"--api-key-file {http.api_key_file}"
        try:
            lines = Path(http.api_key_file).read_text(encoding="ascii").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{origin} cannot be read as ASCII text") from error
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise UsageError(f"{origin} holds no key; give one a line")
        keys += [check_key(key, origin) for key in found]
    return tuple(keys)


def default_frontend_workers() -> int:
    """One HTTP process for every four cores that this process may use, 1 at least."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(MAX_AUTO_FRONTENDS, cores // CORES_PER_FRONTEND))


def _prepare_process(config: ServeConfig) -> None:
    """Limits and names that all children inherit."""
    configure_logging(config.http.log_level, config.http.log_format)
    # The port and the word that scripts wait for are printed whatever the level is.
    logging.getLogger("duograph.server").setLevel(logging.INFO)
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump holds prompts
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    # also takes a key out of the command line that other users of this machine can read
    setproctitle.setproctitle("duograph: supervisor")


def _run_tree(plan: Plan, environ: Mapping[str, str]) -> ExitCode:
    signals = SignalQueue()
    http = plan.config.http
    report = StartupReport(bars=sys.stderr.isatty() and http.log_format == "text")
    children: list[Child] = []
    try:
        tcp.listen(plan.listeners)
        _log.info("Listening on %s", tcp.url_of(plan.listeners[0], http.host))
        # All children first: starting a process is safest while this one has one thread.
        children.append(_start_scheduler(plan, environ))
        for index in range(plan.num_frontends):
            children.append(_start_frontend(plan, index, environ))
        url = tcp.url_of(plan.listeners[0])
        for listener in plan.listeners:
            listener.close()  # or connections would queue up here for a frontend that has ended
        with zmq.Context() as context:
            messages: Receiver[ToSupervisor] = Receiver(
                context, supervisor_address(str(plan.run_dir)), ToSupervisor
            )
            try:
                return _supervisor(plan, url, children, messages, signals, report).run()
            finally:
                messages.close()
    finally:
        for child in children:  # only if one could not be started
            child.process.kill()
            child.process.wait()
        signals.close()


def _supervisor(
    plan: Plan,
    url: str,
    children: list[Child],
    messages: Receiver[ToSupervisor],
    signals: SignalQueue,
    report: StartupReport,
) -> Supervisor:
    http = plan.config.http
    key = plan.api_keys[0] if plan.api_keys else None

    def first_request() -> str | None:
        return warm_up(url, plan.served_names[0], key)

    return Supervisor(
        scheduler=children[0],
        frontends=children[1:],
        messages=messages,
        signals=signals,
        report=report,
        first_request=None if http.skip_server_warmup else first_request,
        shutdown_timeout=http.shutdown_timeout,
        silence_timeout=plan.config.scheduler.watchdog_timeout + WATCHDOG_GRACE_S,
    )


def _start_scheduler(plan: Plan, environ: Mapping[str, str]) -> Child:
    config = EngineConfig(
        runner=plan.config.runner,
        scheduler=plan.config.scheduler,
        run_dir=str(plan.run_dir),
        num_frontends=plan.num_frontends,
        parent_pid=os.getpid(),
        model_folder=str(plan.model.folder),
        served_name=plan.served_names[0],
        log_level=plan.config.http.log_level,
        log_format=plan.config.http.log_format,
        spawned_at=time.monotonic(),
    )
    environ = engine_environment(environ)
    return start_child("scheduler", "duograph.scheduler", config, environ=environ)


def _start_frontend(plan: Plan, index: int, environ: Mapping[str, str]) -> Child:
    runner, scheduler = plan.config.runner, plan.config.scheduler
    admin_key = plan.config.http.admin_api_key
    listener = plan.listeners[index]
    config = FrontendConfig(
        http=replace(plan.config.http, api_key=None, api_key_file=None, admin_api_key=None),
        run_dir=str(plan.run_dir),
        index=index,
        listen_fd=listener.fileno(),
        parent_pid=os.getpid(),
        model_folder=str(plan.model.folder),
        served_names=plan.served_names,
        context_length=runner.context_length,
        max_queue=scheduler.max_queue,
        engine_silence_s=scheduler.watchdog_timeout + WATCHDOG_GRACE_S,
        server_info=flag_values(plan.config),
        api_keys=plan.api_keys,
        admin_keys=() if admin_key is None else (admin_key,),
    )
    role = f"frontend {index}"
    fds = (listener.fileno(),)
    return start_child(role, "duograph.server.frontend", config, environ=environ, keep_fds=fds)


def flag_values(config: ServeConfig) -> dict[str, object]:
    """Every flag and its value as given or by default, without keys: for /server_info."""
    owners = (config.runner, config.runner.graph, config.scheduler, config.http)
    by_type = {type(owner): owner for owner in owners}
    secret = ("api_key", "api_key_file", "admin_api_key")
    return {
        option.name: getattr(by_type[option.owner], option.name)
        for option in options()
        if option.name not in secret
    }
