"""Help for the flags, short by default and deeper on demand: ``--help``, ``--help=all``,
``--help=GROUP``, ``--help=FLAG``. Knows flags by their metadata; parses nothing."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence

from duograph.server.aliases import ALIASES, SILENT_ALIASES
from duograph.server.options import ENV_PREFIX, Option, UsageError, did_you_mean

# What most users need, in this order.
COMMON = (
    "model-path", "served-model-name", "host", "port", "api-key-file", "context-length",
    "mem-fraction-static", "max-running-requests", "cuda-graph-max-bs", "disable-cuda-graph",
    "piecewise-cuda-graph-max-tokens", "disable-piecewise-cuda-graph", "log-level",
)  # fmt: skip
_INDENT = 34


def help_text(topic: str, known: Sequence[Option], *, command: str = "serve") -> str:
    """``topic`` is "" for the short help, "all", a group or a flag. Raises UsageError."""
    by_flag = {option.flag: option for option in known}
    if not topic:
        return _short(known, by_flag, command)
    if topic == "all":
        titles = [group(option) for option in known]
        return "\n".join(_section(title, known) for title in dict.fromkeys(titles))
    names = group_names(known)
    found = [title for key, title in names.items() if key == topic.lower() or title == topic]
    if found:
        return "\n".join(_section(title, known) for title in found)
    flag = topic.lstrip("-").replace("_", "-")
    flag = ALIASES.get(flag, SILENT_ALIASES.get(flag, flag))
    if flag in by_flag:
        return _one(by_flag[flag])
    hint = did_you_mean(topic, ["all", *names, *by_flag])
    raise UsageError(
        f"--help={topic}: no such group or flag{hint}; groups are {', '.join(names)}, all"
    )


def group(option: Option) -> str:
    return str(option.metadata["group"])


def group_names(known: Sequence[Option]) -> dict[str, str]:
    """Short name -> title, such as "decode" -> "CUDA graphs, decode"."""
    titles = dict.fromkeys(group(option) for option in known)
    return {_short_name(title): title for title in titles}


def _short_name(title: str) -> str:
    words = title.lower().split()
    return words[-1] if "," in title else words[0]


def flag_help(option: Option) -> str:
    """One paragraph: what it does, its default and its variable."""
    parts = [str(option.metadata["help"])]
    if option.default not in (None, (), "", False):
        parts.append(f"(default {option.default})")
    parts.append(f"[{option.env}]")
    return " ".join(parts)


def metavar(option: Option) -> str:
    if option.metadata["choices"]:
        return "{" + ",".join(option.metadata["choices"]) + "}"
    if option.metadata["metavar"]:
        return str(option.metadata["metavar"])
    return {int: "N", float: "X", str: "TEXT"}[option.kind]


def _short(known: Sequence[Option], by_flag: Mapping[str, Option], command: str) -> str:
    rows = [_entry(by_flag[flag], with_env=False) for flag in COMMON]
    groups = ", ".join(group_names(known))
    return (
        f"usage: duograph {command} [MODEL] [flags]\n\n"
        "MODEL is a folder with config.json and safetensors, a .gguf file or a hub id; the\n"
        "default model if left out. The flags that most people need:\n\n"
        + "".join(rows)
        + f"\n  --help=all      all {len(known)} flags, with their variables\n"
        f"  --help=GROUP    one group: {groups}\n"
        "  --help=FLAG     everything about one flag\n"
        "  --config FILE   YAML or TOML with flags as keys\n"
        "  --print-config  every value and where it comes from, as such a file\n"
        f"\nEvery flag has a variable, {ENV_PREFIX}FLAG; the command line beats it, and it beats "
        "the file.\n"
    )


def _section(title: str, known: Sequence[Option]) -> str:
    rows = [_entry(option) for option in known if group(option) == title]
    return f"{title}:\n" + "".join(rows)


def _entry(option: Option, *, with_env: bool = True) -> str:
    value = (
        "" if option.kind is bool else f" {metavar(option)}" + (" ..." if option.is_list else "")
    )
    head = f"  --{option.flag}{value}"
    text = flag_help(option) if with_env else str(option.metadata["help"])
    width = max(60, min(100, shutil.get_terminal_size().columns))
    lines = textwrap.wrap(text, width - _INDENT, break_on_hyphens=False)
    if len(head) > _INDENT - 2:
        return head + "\n" + "".join(f"{'':{_INDENT}}{line}\n" for line in lines)
    first = f"{head:{_INDENT}}{lines[0]}\n"
    return first + "".join(f"{'':{_INDENT}}{line}\n" for line in lines[1:])


def _one(option: Option) -> str:
    meta = option.metadata
    facts = [("group", group(option)), ("variable", option.env), ("key in a file", option.flag)]
    if meta["choices"]:
        facts.append(("one of", ", ".join(meta["choices"])))
    if meta["minimum"] is not None or meta["maximum"] is not None:
        bounds = [f"at least {meta['minimum']}"] * (meta["minimum"] is not None)
        bounds += [f"at most {meta['maximum']}"] * (meta["maximum"] is not None)
        facts.append(("range", ", ".join(bounds)))
    automatic = option.default in (None, ())
    facts.append(("default", "left out" if automatic else repr(option.default)))
    others = [name for name, ours in {**ALIASES, **SILENT_ALIASES}.items() if ours == option.flag]
    if others:
        facts.append(("also accepted", ", ".join(f"--{name}" for name in others)))
    if option.kind is bool:
        facts.append(("turned off by", f"--no-{option.flag}"))
    lines = [f"  {name + ':':16}{value}" for name, value in facts]
    return _entry(option, with_env=False) + "\n" + "\n".join(lines) + "\n"
