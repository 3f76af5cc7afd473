"""Rules that hold for every source file: imports go down only, nothing can run foreign code,
and the processes that face the user load no torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ("kernels", "runners", "scheduler", "server")  # lowest first
SOURCES = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
FLOOR_PREFIXES = tuple(f"duograph.{floor}." for floor in FLOORS)
MODULE_NAME = re.compile(r"duograph\.(\w+)(\.\w+)*")

# Whatever can turn data into code.
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {
    ("torch", "load"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
    ("yaml", "full_load"),
}
FORBIDDEN_METHODS = {"recv_pyobj", "send_pyobj"}
FORBIDDEN_ARGUMENTS = {"trust_remote_code", "allow_pickle"}


def upward_references(tree: ast.AST, floor: str) -> Iterator[str]:
    """Imports, and module names in strings, of a floor above ``floor``; wherever they stand."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield f"line {node.lineno}: relative import"
            elif node.module == "duograph":
                names = [f"duograph.{alias.name}" for alias in node.names]
            else:
                names = [node.module or ""]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # a module name for python -m or import_module, and not some other dotted word
            names = [node.value] if node.value.startswith(FLOOR_PREFIXES) else []
        for name in names:
            match = MODULE_NAME.fullmatch(name)
            if match is None:
                continue
            if match[1] not in FLOORS or FLOORS.index(match[1]) > FLOORS.index(floor):
                line = getattr(node, "lineno", 0)
                yield f"line {line}: {name}"


def dangers(tree: ast.AST) -> Iterator[str]:
    """Everything that unpickles, evaluates or trusts what came from outside."""
    for node in ast.walk(tree):
        found = ""
        if isinstance(node, ast.Import):
            roots = {alias.name.split(".")[0] for alias in node.names}
            found = ", ".join(roots & FORBIDDEN_MODULES)
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")[0]
            found = module if module in FORBIDDEN_MODULES else ""
            for alias in node.names:
                if (module, alias.name) in FORBIDDEN_ATTRIBUTES:
                    found = f"{module}.{alias.name}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found = node.func.id if node.func.id in FORBIDDEN_CALLS else ""
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if (owner, node.attr) in FORBIDDEN_ATTRIBUTES or node.attr in FORBIDDEN_METHODS:
                found = f"{owner}.{node.attr}"
        elif isinstance(node, ast.keyword) and node.arg in FORBIDDEN_ARGUMENTS:
            is_false = isinstance(node.value, ast.Constant) and node.value.value is False
            found = "" if is_false else str(node.arg)
        if found:
            yield f"line {getattr(node, 'lineno', 0)}: {found}"


def environment_reads_at_import(tree: ast.Module) -> Iterator[str]:
    """``os.environ`` and ``os.getenv`` outside of functions."""

    class Finder(ast.NodeVisitor):
        def __init__(self) -> None:
            self.lines: list[int] = []

        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            for default in (*node.args.defaults, *node.args.kw_defaults, *node.decorator_list):
                if default is not None:
                    self.visit(default)

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            pass

        def visit_Lambda(self, node: ast.Lambda) -> None:
            pass

        def visit_Attribute(self, node: ast.Attribute) -> None:
            if node.attr in ("environ", "getenv"):
                self.lines.append(node.lineno)

    finder = Finder()
    finder.visit(tree)
    for line in finder.lines:
        yield f"line {line}"


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def report(check_name: str, findings: list[str]) -> None:
    assert not findings, f"{check_name}:\n" + "\n".join(findings)


def test_there_are_sources_on_every_floor() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} == set(FLOORS)


def test_imports_go_down_only() -> None:
    report(
        "imports of a higher floor",
        [
            f"{path.relative_to(ROOT)} {finding}"
            for path in SOURCES
            for finding in upward_references(parsed(path), path.relative_to(ROOT).parts[0])
        ],
    )


def test_nothing_turns_data_into_code() -> None:
    report(
        "dangerous calls",
        [
            f"{path.relative_to(ROOT)} {finding}"
            for path in SOURCES
            for finding in dangers(parsed(path))
        ],
    )


def test_no_module_reads_the_environment_at_import() -> None:
    report(
        "environment reads at import",
        [
            f"{path.relative_to(ROOT)} {finding}"
            for path in SOURCES
            for finding in environment_reads_at_import(parsed(path))
        ],
    )


def test_floors_are_namespace_folders() -> None:
    """A kernels/__init__.py at the root would shadow a distribution of that name."""
    assert [floor for floor in FLOORS if (ROOT / floor / "__init__.py").exists()] == []


@pytest.mark.parametrize(
    ("source", "floor"),
    [
        ("import duograph.server.app", "scheduler"),
        ("def f():\n    from duograph.scheduler import loop", "runners"),
        ("if TYPE_CHECKING:\n    from duograph.runners.batch import X", "kernels"),
        ("from duograph import server", "kernels"),
        ("from . import x", "server"),
        ("run('duograph.server.frontend')", "scheduler"),
        ("import duograph.tests.x", "server"),
    ],
)
def test_the_import_check_finds(source: str, floor: str) -> None:
    assert list(upward_references(ast.parse(source), floor))


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "x = eval('1')",
        "exec(code)",
        "torch.load(path)",
        "from torch import load",
        "yaml.load(text)",
        "socket.recv_pyobj()",
        "f(trust_remote_code=True)",
        "f(trust_remote_code=config.trust)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_the_danger_check_finds(source: str) -> None:
    assert list(dangers(ast.parse(source)))


def test_the_danger_check_leaves_harmless_code_alone() -> None:
    source = "model.eval()\nyaml.safe_load(t)\nre.compile('x')\nf(trust_remote_code=False)"
    assert list(dangers(ast.parse(source))) == []
    assert list(environment_reads_at_import(ast.parse("def f():\n    os.environ['X']"))) == []
    assert list(environment_reads_at_import(ast.parse("X = os.environ['X']")))


SUPERVISOR = ("cli", "args", "arg_checks", "launch", "supervisor", "model_store", "check_env")
FRONTEND = ("frontend", "http_server", "app", "serving", "tokenizer", "engine_client")
POLICY = ("scheduler", "planner", "policy", "admission", "radix_cache", "page_pool", "queues")


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        ([f"duograph.server.{name}" for name in SUPERVISOR], ("torch", "fastapi", "transformers")),
        ([f"duograph.server.{name}" for name in FRONTEND], ("torch", "duograph.runners.batch")),
        ([f"duograph.scheduler.{name}" for name in POLICY], ("torch", "zmq")),
    ],
    ids=["supervisor", "frontend", "policy"],
)
def test_what_a_process_does_not_load(modules: list[str], unwanted: tuple[str, ...]) -> None:
    code = f"import sys, {', '.join(modules)}\nprint(*(m for m in {unwanted} if m in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / ".src",
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []
