"""A package that brings workflows and never makes an engine (`sessions`), and an application that runs them (`app`)."""
