"""examples/document_etl.py, on the texts that come with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from celery_durable import Status
from celery_durable.testing import DurableHarness
from examples import document_etl as etl

pytestmark = pytest.mark.durable(workflows=[etl.document_etl])
TEXTS = Path(etl.__file__).parent / "texts"


def test_the_texts_become_an_index(durable_harness: DurableHarness, tmp_path: Path) -> None:
    target = tmp_path / "index.json"
    handle = durable_harness.create(etl.document_etl, etl.Folder(path=str(TEXTS), index=str(target)))
    durable_harness.run_until_idle()
    report = handle.result()
    assert isinstance(report, etl.Report)
    assert (report.documents, report.index) == (4, str(target))

    index = json.loads(target.read_text())
    assert len(index) == report.words
    assert index["ferryman"] == ["ferry.txt"]
    assert index["morning"] == ["bakery.txt", "ferry.txt", "lighthouse.txt"]
    assert sorted(step.name for step in handle.history().steps) == [
        "list documents", "read archive.txt", "read bakery.txt", "read ferry.txt", "read lighthouse.txt", "write index",
    ]  # fmt: skip
    assert [(line.message, line.data["documents"]) for line in handle.logs()] == [("indexed", 4)]


def test_a_document_that_cannot_be_read_is_tried_again_by_itself(
    durable_harness: DurableHarness, tmp_path: Path
) -> None:
    for path in TEXTS.glob("*.txt"):
        shutil.copy(path, tmp_path)
    (tmp_path / "broken.txt").write_bytes(b"\xff\xfe not text")
    handle = durable_harness.create(
        etl.document_etl, etl.Folder(path=str(tmp_path), index=str(tmp_path / "index.json"))
    )
    durable_harness.run_until_idle()
    assert handle.status().status is Status.WAITING
    assert list(handle.statuses().values()).count("completed") == 5  # its siblings are done

    (tmp_path / "broken.txt").write_text("fixed")
    durable_harness.advance("10 seconds")
    assert handle.result().documents == 5
    attempts = {step.name: step.attempts for step in handle.history().steps}
    assert attempts.pop("read broken.txt") == 2
    assert set(attempts.values()) == {1}


def test_an_empty_folder_is_an_error_at_once(durable_harness: DurableHarness, tmp_path: Path) -> None:
    handle = durable_harness.create(etl.document_etl, etl.Folder(path=str(tmp_path), index="index.json"))
    durable_harness.run_until_idle()
    status = handle.status()
    assert status.status is Status.ERRORED
    assert (status.error.name, status.error.message) == ("NonRetryableError", f"no *.txt in {tmp_path}")
