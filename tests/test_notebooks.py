"""Notebooks run from top to bottom, as a reader runs them, and are kept without their outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_something(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    shown = [kind for cell in cells for output in cell.outputs for kind in output.get("data", {})]
    assert "image/png" in shown
    assert not [output for cell in cells for output in cell.outputs if output.get("name") == "stderr"]


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["streaming_tour", "train_tiny_moe"]
