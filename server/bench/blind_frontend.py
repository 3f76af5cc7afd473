"""A frontend that counts nothing: the other half of ``bench frontend --cost-of-metrics``."""

from __future__ import annotations

import sys

from duograph.server import frontend, http_server
from duograph.server.metrics import FrontendMetrics


class BlindMetrics(FrontendMetrics):
    """Every observation is dropped."""

    def begin(self, prompt_tokens: int) -> None:
        pass

    def first_token(self, seconds: float) -> None:
        pass

    def tokens(self, count: int, seconds: float) -> None:
        pass

    def end(self, seconds: float, *, aborted: bool) -> None:
        pass

    def response(self, status: int) -> None:
        pass


if __name__ == "__main__":
    setattr(http_server, "FrontendMetrics", BlindMetrics)  # noqa: B010  (mypy takes no class)
    sys.exit(frontend.main())
