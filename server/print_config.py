"""``--print-config``: every flag's value with where it comes from, as a file that ``--config``
reads. Keys of the API are not shown."""

from __future__ import annotations

import json
from typing import Any

from duograph.server.args import ServeConfig, options
from duograph.server.options import Option

SECRETS = ("api_key", "admin_api_key")
_WIDTH = 44


def config_text(config: ServeConfig) -> str:
    """YAML, one line a flag, by group. Null is left out: the start chooses, or there is none."""
    owners = (config.runner, config.runner.graph, config.scheduler, config.http)
    by_type = {type(owner): owner for owner in owners}
    lines: list[str] = []
    title = ""
    for option in sorted(options(), key=_first_of_group()):
        if option.metadata["group"] != title:
            title = option.metadata["group"]
            lines += ["", f"# {title}"] if lines else [f"# {title}"]
        value = getattr(by_type[option.owner], option.name)
        lines.append(_line(option, value, config.origins.get(option.name)))
    return "\n".join(lines) + "\n"


def _first_of_group() -> Any:
    """Sort key: groups in the order in which they first come."""
    titles = list(dict.fromkeys(option.metadata["group"] for option in options()))
    return lambda option: titles.index(option.metadata["group"])


def _line(option: Option, value: Any, origin: str | None) -> str:
    if option.name in SECRETS:
        said = "not set" if value is None else f"set by {origin}, not shown"
        return f"# {option.flag}: {said}"
    if origin is None:
        origin = "left out" if value in (None, ()) else "default"
    text = "null" if value in (None, ()) else json.dumps(value)  # JSON is YAML
    return f"{f'{option.flag}: {text}':{_WIDTH}}  # {origin}"
