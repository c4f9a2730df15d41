"""Reading a database's bytes leaves the locks of the process alone, so its snapshot stays as it is."""

import os
import subprocess
import sys

import numpy as np
import pytest

from xbm.errors import DamagedFileError
from xbm_app.files import record_checksum, verify
from xbm_app.search.catalogue import FILE, Catalogue, Entry

WRITER = """
import sys
from pathlib import Path
from xbm_app.search.catalogue import Catalogue
catalogue = Catalogue(Path(sys.argv[1]), write=True)
with catalogue.change():
    for key in catalogue.known():
        catalogue.discard(key)
catalogue.publish()
catalogue.seal()
catalogue.close()
"""


@pytest.fixture
def index(tmp_path):
    catalogue = Catalogue(tmp_path, write=True)
    catalogue.set("dim", 3)
    with catalogue.change():
        entries = [Entry(f"{number}.png", "a", 1, 1) for number in range(400)]
        catalogue.add(entries, np.eye(3, dtype=np.float32)[np.arange(400) % 3], [bytes(2000)] * 400)
    catalogue.publish()
    catalogue.seal()
    catalogue.close()
    return tmp_path


@pytest.mark.skipif(os.name == "nt", reason="Windows has other locks")
@pytest.mark.parametrize("reads", [verify, record_checksum])
def test_a_held_snapshot_survives_that_the_file_is_read_and_written(index, reads):
    held = Catalogue(index)
    held.hold()
    ids = held.ids()
    reads(index / FILE)
    for _ in range(2):  # the writer closes the database: were it the last one, it would delete the log of the snapshot
        subprocess.run([sys.executable, "-c", WRITER, str(index)], check=True)
        assert (index / f"{FILE}-wal").exists()
        assert len(held.items(ids.tolist())) == len(ids) == 400
    held.close()
    assert len(Catalogue(index)) == 0


def test_a_database_that_was_replaced_is_read_anew(index):
    verify(index / FILE)
    (index / "other").write_bytes((index / FILE).read_bytes() + bytes(4096))
    (index / "other").replace(index / FILE)
    with pytest.raises(DamagedFileError):
        verify(index / FILE)
