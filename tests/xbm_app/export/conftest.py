"""Shared by the tests of exporting: one export that nobody may change."""

from pathlib import Path

import pytest

from xbm_app.export import Exported, export_run


@pytest.fixture(scope="session")
def exported(searchable: Path, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return export_run(searchable, tmp_path_factory.mktemp("exported") / "model")
