"""Exit codes of the process tree. A child that fails says its code in ProcessFailed and exits
with it; the supervisor exits with the same one."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    OK = 0
    INTERNAL = 1
    USAGE = 2
    MODEL = 3  # the model cannot be found, read or converted
    OUT_OF_MEMORY = 4
    PORT_IN_USE = 5
    SCHEDULER_DIED = 6
    FRONTEND_DIED = 7
    INTERRUPTED = 130  # a second signal cut the drain short
