"""examples/document_etl.py, on the texts that come with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from celery_durable import Status
from examples import document_etl as etl

TEXTS = Path(etl.__file__).parent / "texts"


def test_the_texts_become_an_index(world, tmp_path: Path) -> None:
    target = tmp_path / "index.json"
    handle = world.workflow("document-etl").create(etl.Folder(path=str(TEXTS), index=str(target)))
    report = handle.result(timeout=0)
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


def test_a_document_that_cannot_be_read_is_tried_again_by_itself(world, tmp_path: Path) -> None:
    for path in TEXTS.glob("*.txt"):
        shutil.copy(path, tmp_path)
    (tmp_path / "broken.txt").write_bytes(b"\xff\xfe not text")
    handle = world.workflow("document-etl").create(etl.Folder(path=str(tmp_path), index=str(tmp_path / "index.json")))
    assert handle.status().status is Status.WAITING
    assert len(world.completed(handle)) == 5  # its siblings are done

    (tmp_path / "broken.txt").write_text("fixed")
    world.advance(seconds=10)
    assert handle.result(timeout=0).documents == 5
    attempts = {step.name: step.attempts for step in handle.history().steps}
    assert attempts.pop("read broken.txt") == 2
    assert set(attempts.values()) == {1}


def test_an_empty_folder_is_an_error_at_once(world, tmp_path: Path) -> None:
    handle = world.workflow("document-etl").create(etl.Folder(path=str(tmp_path), index="index.json"))
    status = handle.status()
    assert status.status is Status.ERRORED
    assert (status.error.name, status.error.message) == ("NonRetryableError", f"no *.txt in {tmp_path}")
