"""`CodeWatcher`: whether the source of the application has changed since it was imported, for `durable dev`."""

from __future__ import annotations

import sys
from pathlib import Path


class CodeWatcher:
    """Remembers the modules that the process has imported from ``folder``, and when their files were last written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._seen: dict[Path, int] = {}
        self.find_changed()

    def find_changed(self) -> list[Path]:
        """Return the files that were written since the last call, or since their import, without those of packages."""
        changed: list[Path] = []
        for path in self._imported_files():
            try:
                written_at = path.stat().st_mtime_ns
            except OSError:  # deleted, or an editor is replacing it
                continue
            if self._seen.setdefault(path, written_at) != written_at:
                self._seen[path] = written_at
                changed.append(path)
        return changed

    def _imported_files(self) -> list[Path]:
        names = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        files = [Path(name) for name in names if isinstance(name, str) and name.endswith(".py")]
        return [path for path in files if self._folder in path.parents and "site-packages" not in path.parts]


def find_syntax_error(path: Path) -> str | None:
    """Return what is wrong with the syntax of a file; None if it can be compiled."""
    try:
        compile(path.read_bytes(), str(path), "exec")
    except (SyntaxError, ValueError) as exc:
        return f"{path}: {exc}"
    return None
