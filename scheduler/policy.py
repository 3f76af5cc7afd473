"""Orders: who comes in first, who goes out first. Pure functions over requests.

Nothing here changes a request; ``match`` asks the prefix cache without counting as a use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from duograph.scheduler.request import Request

# After this many retractions a request is served first and retracted last.
MAX_RETRACTIONS = 5
WINDOW = 128  # waiting requests that one step looks at
LPM_PATIENCE = 32  # prefill steps in which a request may be overtaken


def has_priority(request: Request) -> bool:
    return request.retractions >= MAX_RETRACTIONS


def arrival_order(request: Request) -> tuple[bool, int, int]:
    """Sort key of the waiting queue: a retracted request keeps its place of arrival."""
    return not has_priority(request), request.rank, request.seq


def longest_prefix_first(
    waiting: Sequence[Request], match: Callable[[Request], int]
) -> list[Request]:
    """``waiting`` (in arrival order) by cached tokens, longest first; the overdue ones lead."""

    def key(request: Request) -> tuple[bool, int, int]:
        if has_priority(request) or request.deferred > LPM_PATIENCE:
            return False, 0, request.seq
        return True, -match(request), request.seq

    return sorted(waiting[:WINDOW], key=key) + list(waiting[WINDOW:])


def victims(running: Sequence[Request]) -> list[Request]:
    """Whom to retract first when pages run out: of the last rank, who loses least by it, the
    newest of equals. The last of the list is the one to keep."""
    return sorted(running, key=lambda r: (has_priority(r), -r.rank, len(r.output_ids), -r.seq))
