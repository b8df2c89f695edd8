"""The JSON of the HTTP API, without a web framework: `http` sends it, and `cli` reads and prints it."""
