"""How the documentation is built: `make docs`."""

from importlib.metadata import version as version_of

project = "celery_durable"
author = "The celery_durable authors"
copyright = "2026, The celery_durable authors"
release = version_of("celery-durable")
version = ".".join(release.split(".")[:2])

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
nitpicky = True

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"celery_durable {release}"
html_copy_source = False
