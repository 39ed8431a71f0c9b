from __future__ import annotations

from pathlib import Path

import pytest

from stepgym.cli.main import run


def test_a_package_is_written_and_can_be_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["new-env", "button-press", "--dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"wrote {tmp_path / 'button-press'}\n" in out
    assert "stepgym check-env button-press" in out
    monkeypatch.syspath_prepend(str(tmp_path / "button-press"))
    assert run(["check-env", "button_press.env:ButtonPressEnv"]) == 0
    assert "all checks passed" in capsys.readouterr().out


def test_a_folder_that_exists_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "button-press").mkdir()
    assert run(["new-env", "button-press", "--dir", str(tmp_path)]) == 2
    assert (
        capsys.readouterr().err == f"error: new-env: {tmp_path / 'button-press'} exists already; nothing was written\n"
    )
    assert list((tmp_path / "button-press").iterdir()) == []
