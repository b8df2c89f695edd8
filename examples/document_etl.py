"""A folder of texts becomes an index: which word stands in which document.

The documents are read at the same time, each on a thread of its own, and each is a step of its own: where one fails
it is tried again by itself, and what is done stays done. Results are stored as JSON in the database, so a
step that makes a file returns its path, not its contents.

In one process, without a worker:

    python -m examples.document_etl examples/texts index.json

Or, once, and then in one terminal, with another for the line above and ``--worker``:

    celery -A examples.document_etl durable migrate
    celery -A examples.document_etl worker
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path

from celery import Celery
from pydantic import BaseModel

from celery_durable import Durable, NonRetryableError, Step, StepConfig, WorkflowEvent, durable_step, durable_workflow
from examples import embedded

app = Celery("documents")
app.conf.update(embedded.settings())
app.conf.durable_dispatcher = "both"  # a worker alone is enough; with beat there are two, which does no harm
durable = Durable(app)


class Folder(BaseModel):
    path: str
    index: str


class Document(BaseModel):
    path: str
    lines: int
    words: dict[str, int]


class Report(BaseModel):
    documents: int
    words: int
    most_common: list[str]
    index: str


def list_documents(folder: str) -> list[str]:
    found = sorted(str(path) for path in Path(folder).glob("*.txt"))
    if not found:
        # Another attempt would find nothing either.
        raise NonRetryableError(f"no *.txt in {folder}")
    return found


@durable_step(retries=3, timeout="1 minute")
def read_document(path: str) -> Document:
    text = Path(path).read_text(encoding="utf-8")
    words = Counter(re.findall(r"[a-z]{5,}", text.lower()))
    return Document(path=path, lines=len(text.splitlines()), words=dict(words))


def write_index(documents: list[Document], path: str) -> str:
    index: dict[str, list[str]] = {}
    for document in documents:
        for word in document.words:
            index.setdefault(word, []).append(Path(document.path).name)
    # A body may run twice, and may be killed half way: write beside, then rename. Twice is like once.
    target = Path(path)
    part = target.with_name(f".{target.name}.part")
    part.write_text(json.dumps(index, indent=1, sort_keys=True), encoding="utf-8")
    part.rename(target)
    return str(target)


@durable_workflow(name="document-etl", step_defaults=StepConfig(timeout="5 minutes"))
def document_etl(event: WorkflowEvent[Folder], step: Step) -> Report:
    folder = event.payload
    paths = step.do("list documents", list_documents, folder.path)
    documents = step.gather(*[step.submit(f"read {Path(path).name}", read_document, path) for path in paths])
    index = step.do("write index", write_index, documents, folder.index)

    # Counting is quick and always comes out the same: no step is needed for it.
    words = Counter[str]()
    for document in documents:
        words.update(document.words)
    step.log.info("indexed", documents=len(documents), words=len(words))
    return Report(
        documents=len(documents), words=len(words), most_common=[word for word, _ in words.most_common(5)], index=index
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.document_etl")
    parser.add_argument("folder")
    parser.add_argument("index")
    parser.add_argument("--worker", action="store_true", help="leave the work to a worker")
    args = parser.parse_args()
    if not args.worker:
        app.conf.task_always_eager = True
        durable.migrate()
    handle = document_etl.create(Folder(path=str(Path(args.folder).resolve()), index=str(Path(args.index).resolve())))
    report = handle.result(timeout="1 minute")
    print(f"{report.documents} documents, {report.words} words, above all {', '.join(report.most_common)}")
    print(f"Index: {report.index}")


if __name__ == "__main__":
    main()
